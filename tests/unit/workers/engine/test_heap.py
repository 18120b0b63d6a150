from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cotrain_workers.engine import heap

SOURCE_ROOT = Path(heap.__file__).parents[2]

# Ten tensors of 6 MB, made and freed again and again; prints the page faults of the last round.
CHURN = """
import resource, sys, torch
from cotrain_workers.engine.heap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print(-1)
    raise SystemExit
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2048, 768) for _ in range(10)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", CHURN, mode]
    done = subprocess.run(
        command, cwd=SOURCE_ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    return int(done.stdout)


def test_kept_memory_is_not_faulted_in_again() -> None:
    kept = page_faults("keep")
    if kept < 0:
        pytest.skip("the C library has no mallopt")

    pages_of_one_round = 10 * 2048 * 768 * 4 // resource.getpagesize()
    assert kept < pages_of_one_round / 10
