"""States from which a run can be replayed."""

from __future__ import annotations

from typing import Any

import pytest

from cotrain_store.errors import SpoolCorrupt
from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import OpKind, QueuedOp
from cotrain_store.oplog.reader import log_position
from cotrain_workers.recovery.replay import rewind_target, starts_of, timelines

MADE = {"tenant": "a", "state": "live", "done": "9"}
NEWEST = {"snap": "8", "snapfile": "new", "snapsha": "n"}
OLDER = {"oldsnap": "4", "oldfile": "old", "oldsha": "o"}


def starts(**row: Any) -> list[tuple[int, str, str]]:
    return [(start.seq, start.file, start.sha256) for start in starts_of(log_position(MADE | row))]


def test_a_run_without_a_snapshot_is_replayed_from_its_creation() -> None:
    assert starts(snap="-1") == [(-1, "", "")]


def test_the_creation_of_a_run_is_the_base_after_its_first_snapshot() -> None:
    assert starts(**NEWEST, oldsnap="-1") == [(8, "new", "n"), (-1, "", "")]


def test_the_newest_snapshot_comes_before_the_previous_one() -> None:
    assert starts(**NEWEST, **OLDER) == [(8, "new", "n"), (4, "old", "o")]


def test_a_snapshot_without_a_file_is_not_a_base() -> None:
    assert starts(**NEWEST, oldsnap="4") == [(8, "new", "n")]


def test_each_base_has_the_numerics_id_of_its_log() -> None:
    def numerics(**row: str) -> list[str]:
        position = log_position(MADE | NEWEST | OLDER | row)
        return [start.numerics_id for start in starts_of(position)]

    assert numerics(numerics="x", oldnumerics="x") == ["x", "x"]
    assert numerics(numerics="x", oldnumerics="y") == ["x", "mixed"]
    assert numerics(numerics="x") == ["x", "x"]
    assert numerics(oldnumerics="y") == ["", "y"]


def ops(*kinds: OpKind) -> list[QueuedOp]:
    return [QueuedOp(RunId("r"), seq, kind, 0, "inline", 0, 0.0) for seq, kind in enumerate(kinds)]


def seqs(log: list[QueuedOp], start: int, rewinds: dict[int, int]) -> list[list[int]]:
    return [[op.seq for op in part] for part in timelines(log, start, rewinds)]


CREATE, STEP, SAVE, REWIND = OpKind.CREATE, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.REWIND


def test_a_rewind_drops_the_ops_after_its_state_and_a_refused_one_none() -> None:
    log = ops(CREATE, STEP, STEP, REWIND, STEP, REWIND, STEP, REWIND)
    assert seqs(log, -1, {3: 1, 7: 4}) == [[0, 1, 4]]
    assert seqs(log, -1, {}) == [[0, 1, 2, 4, 6]]
    assert seqs(log[5:], 4, {7: 4}) == [[]]
    with pytest.raises(SpoolCorrupt, match="before this copy"):
        timelines(log[3:], 2, {3: 1})


def test_lost_saves_that_a_rewind_dropped_are_made_again_first() -> None:
    log = ops(CREATE, STEP, SAVE, STEP, SAVE, REWIND, STEP, SAVE)
    assert seqs(log, -1, {5: 1}) == [[0, 1, 2, 3, 4], [0, 1, 6, 7]]
    assert seqs(log, -1, {}) == [[0, 1, 2, 3, 4, 6, 7]]


def test_a_step_within_the_log_has_its_seq_and_another_one_a_reason() -> None:
    row = {"step:6": "2", "step:9": "3", "step:12": "4"}
    position = log_position(MADE | NEWEST | OLDER | row)  # done is 9
    assert [rewind_target(position, step) for step in (2, 3)] == [6, 9]
    assert str(rewind_target(position, 1)).startswith("step 1 is out of reach: this run can go back to steps 2 to 3,")
    whole = log_position(MADE | NEWEST | {"oldsnap": "-1"})
    assert (whole.reaches_start, rewind_target(whole, 0)) == (True, 0)
    assert "holds no optimizer step" in str(rewind_target(log_position(MADE | NEWEST | OLDER), 0))
