"""States from which a run can be replayed."""

from __future__ import annotations

from typing import Any

from cotrain_store.oplog.reader import log_position
from cotrain_workers.recovery.replay import bases_of

MADE = {"tenant": "a", "state": "live", "done": "9"}
NEWEST = {"snap": "8", "snapfile": "new", "snapsha": "n"}
OLDER = {"oldsnap": "4", "oldfile": "old", "oldsha": "o"}


def bases(**row: Any) -> list[tuple[int, str, str]]:
    return [(base.seq, base.file, base.sha256) for base in bases_of(log_position(MADE | row))]


def test_a_run_without_a_snapshot_is_replayed_from_its_creation() -> None:
    assert bases(snap="-1") == [(-1, "", "")]


def test_the_creation_of_a_run_is_the_base_after_its_first_snapshot() -> None:
    assert bases(**NEWEST, oldsnap="-1") == [(8, "new", "n"), (-1, "", "")]


def test_the_newest_snapshot_comes_before_the_previous_one() -> None:
    assert bases(**NEWEST, **OLDER) == [(8, "new", "n"), (4, "old", "o")]


def test_a_snapshot_without_a_file_is_not_a_base() -> None:
    assert bases(**NEWEST, oldsnap="4") == [(8, "new", "n")]


def test_each_base_has_the_numerics_id_of_its_log() -> None:
    def numerics(**row: str) -> list[str]:
        position = log_position(MADE | NEWEST | OLDER | row)
        return [base.numerics_id for base in bases_of(position)]

    assert numerics(numerics="x", oldnumerics="x") == ["x", "x"]
    assert numerics(numerics="x", oldnumerics="y") == ["x", "mixed"]
    assert numerics(numerics="x") == ["x", "x"]
    assert numerics(oldnumerics="y") == ["", "y"]
