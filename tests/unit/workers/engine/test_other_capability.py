"""What a CPU may compute otherwise holds with AVX2 only, too, on one that has more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1]  # all tests of workers
#: For torch's own kernels, oneDNN's and MKL's.
AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="this CPU has no more than AVX2: its only kernels were tested already",
)
@pytest.mark.timeout(3600)  # many tests in one
def test_what_is_marked_as_numerics_holds_with_avx2_only() -> None:
    inherited = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    options = ["-n", "0", "-m", "numerics", "-p", "no:cacheprovider", "-q"]
    marked = [path for path in FOLDER.rglob("test_*.py") if "mark.numerics" in path.read_text()]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, sorted(marked))],
        cwd=FOLDER.parents[2],
        env={**inherited, **AVX2_ONLY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
