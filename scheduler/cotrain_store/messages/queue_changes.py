"""What the scheduler hears of a pool's queue: what changed, and why it is woken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.messages.ids import PoolId, WorkerId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.messages.ops import RunQueue


@dataclass(frozen=True)
class QueueChanges:
    """What changed in a pool's queue since a number that the store gave."""

    number: int
    """To ask for next. Less than what was asked for: Redis has lost what it knew."""
    queues: Sequence[RunQueue]
    """As they are now; without ops where a run can not go on any more."""
    ready: int
    """How many runs can go on in all."""
    are_all: bool


@dataclass(frozen=True)
class Wake:
    """Why the scheduler is woken: an op of a run became ready, or a worker became free."""

    pool: PoolId
    worker: WorkerId | None
    """Which has the run; None where none has it, and for one that became free."""
    is_free: bool

    @classmethod
    def parse(cls, text: str) -> Wake:
        """Read `ready {pool}:worker` or `free {pool}:`, as the scripts write it."""
        what, _, where = text.partition(" ")
        pool, _, worker = where.removeprefix("{").partition("}:")
        return cls(PoolId(pool), WorkerId(worker) if worker else None, what == "free")
