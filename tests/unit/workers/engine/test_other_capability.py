"""Tests whose results may depend on the CPU, run with AVX2 only on a CPU that has more.

`make test` leaves this out: continuous integration has a CPU with AVX2 only, and runs those tests on it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.warm.popen import run

FOLDER = Path(__file__).parents[1]  # all tests of workers
#: Variables of torch's own kernels, of oneDNN and of MKL.
AVX2_ONLY = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
#: All three are read at the first product of a process. The parent of the fork computes none, as
#: the assertion on torch confirms.
PYTEST = """
import sys, pytest, torch
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.variants
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="this CPU has no more than AVX2: its only kernels were tested already",
)
@pytest.mark.timeout(3600)  # many tests in one
def test_the_tests_marked_as_numerics_pass_with_avx2_only() -> None:
    inherited = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    options = ["-n", "0", "-m", "numerics", "-p", "no:cacheprovider", "-q"]
    # Plugins that are libraries too are already imported, and contain no assertions of ours.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    marked = [path for path in FOLDER.rglob("test_*.py") if "mark.numerics" in path.read_text()]
    ran = run(
        [sys.executable, "-c", PYTEST, *options, *map(str, sorted(marked))],
        cwd=FOLDER.parents[2],
        env={**inherited, **AVX2_ONLY},
        timeout=3600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
