"""Groups of processes that share one base model compute the same as one process, bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.group.sharded_base import own_bytes
from tests.support.draws import variant
from tests.support.group_program import MICRO_BATCH
from tests.support.group_scenarios import SCENARIOS
from tests.support.tiny_models import build_tiny
from tests.warm.popen import Popen

MEMBERS_S = 120


def run_group(folder: Path, out: Path, size: int, recompute: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Run the scenarios in a group. Return the output of each member."""
    out.mkdir()
    command = [sys.executable, "-P", "-m", "tests.support.group_program"]
    program = Popen([*command, str(folder), str(out), str(size), recompute, *names])
    assert program.wait(MEMBERS_S) == 0
    return [json.loads((out / f"{number}.json").read_text()) for number in range(size)]


# With three members, no row count divides evenly; tied embeddings, a factor that no file holds, a
# window. All of it takes part in a cycle of every run, and in restored runs.
@pytest.mark.parametrize(
    ("size", "family", "tied", "recompute", "names"),
    [(2, "qwen3", False, "always", tuple(SCENARIOS)), variant(3, "gemma2", True, "auto", ("together", "put_back"))],
)
def test_a_group_computes_the_same_as_one_process(
    tmp_path: Path, size: int, family: str, tied: bool, recompute: str, names: Sequence[str]
) -> None:
    """Compare weights, gradients and moments: alone, with other runs, with uneven work, and after
    offloading to the host."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        folder = build_tiny(family, tmp_path / "model", layers=3, tied=tied)
        alone = Engine.load(str(folder), micro_batch_tokens=MICRO_BATCH)
        members = run_group(folder, tmp_path / "out", size, recompute, names)
        first = members[0]
        for name in names:
            wanted = SCENARIOS[name](alone)
            assert first[name] == wanted, name
            assert sum(first[f"{name} members"]) == len(wanted), "each run lives on one member"
            for run in wanted:
                alone.adapters.drop(run)
        assert first["numerics_id"] == alone.facts.numerics_id
        assert alone.facts.numerics.sharding == ""
        assert {member["sharding"] for member in members} == {f"fsdp2/{size}"}
        assert min(first["together members"]) > 0
        _assert_divided(alone, [member["base_bytes"] for member in members])
    finally:
        torch.set_num_threads(threads)


def _assert_divided(alone: Engine, base_bytes: list[int]) -> None:
    """Check that the group holds the base model once, except for the unembedding, which each member
    holds."""
    head = alone._base.head_weight.nbytes
    divided = own_bytes(alone._base) - head
    parts = [each - head for each in base_bytes]
    assert sum(parts) == divided
    # Each matrix is cut between two rows. If its rows do not divide evenly, the last members have
    # fewer.
    assert max(parts) < 1.1 * divided / len(parts)
