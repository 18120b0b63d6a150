"""Where a run's log stands, and what it can be brought back from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class LogPosition:
    """Where a run's log stands: committed to `done`, with ops from `cut` + 1 on.

    Two snapshots are registered: one of the state after `snap`, and its predecessor, after
    `older_snap`. The log reaches back to the older one (`cut == older_snap`), so that a newest file that
    is lost costs a longer replay. -1 and no file: of nothing, which the log then reaches back to.
    """

    tenant: TenantId
    state: RunState
    done: int
    snap: int
    snapshot_file: str
    snapshot_sha256: str
    older_file: str
    older_sha256: str
    older_snap: int
    cut: int
    numerics_id: str
    """Of the workers that wrote the log since `snap` (`mixed` for several, empty for none); a replay by
    another one may differ in the last bits."""
    older_numerics_id: str
    """The like, since `older_snap`."""
    weights_epoch: int
    """How often the run lost its newest state and went on from a checkpoint."""
    rolled_back_to: str
    """The path of the last such checkpoint; empty for none."""


def log_position(row: Mapping[str, str]) -> LogPosition:
    """Read a log's hash. One that a version cut which kept one snapshot reaches back to the newest only."""
    numerics, older = row.get("numerics", ""), row.get("oldnumerics", "")
    is_cut_at_older = "cut" in row and row["cut"] == row["oldsnap"]
    return LogPosition(
        tenant=TenantId(row["tenant"]),
        state=RunState(row["state"]),
        done=int(row["done"]),
        snap=int(row["snap"]),
        snapshot_file=row.get("snapfile", ""),
        snapshot_sha256=row.get("snapsha", ""),
        older_file=row.get("oldfile", ""),
        older_sha256=row.get("oldsha", ""),
        older_snap=int(row.get("oldsnap", -1)),
        cut=int(row["oldsnap"] if is_cut_at_older else row["snap"]),
        numerics_id=numerics,
        older_numerics_id="mixed"
        if older and numerics and older != numerics
        else older or numerics,
        weights_epoch=int(row.get("epoch", 0)),
        rolled_back_to=row.get("rolled_back_to", ""),
    )
