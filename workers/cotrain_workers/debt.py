"""Decide when a run needs a recovery copy, and when it may leave memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_workers.settings import WorkerSettings


@dataclass
class Debt:
    """What would have to be done again for one run if this worker died now."""

    seq: int
    """The last committed seq: what a copy taken now would cover."""
    ops: int = 0
    bytes: int = 0
    compute_s: float = 0.0
    used_at: float = 0.0

    def add(self, seq: int, size: int, compute_s: float, now: float) -> None:
        """Count one committed op."""
        self.seq, self.used_at = seq, now
        self.ops += 1
        self.bytes += size
        self.compute_s += compute_s


def needs_snapshot(debt: Debt, settings: WorkerSettings, now: float) -> bool:
    """Tell whether replaying would take too long, too much room, or the run is at rest."""
    if not debt.ops:
        return False
    return (
        debt.compute_s >= settings.snapshot_debt_s
        or debt.ops >= settings.snapshot_debt_ops
        or debt.bytes >= settings.snapshot_debt_bytes
        or now - debt.used_at >= settings.snapshot_idle_s
    )


def may_leave(debt: Debt, settings: WorkerSettings, now: float) -> bool:
    """Tell whether a run has rested so long, with nothing to replay, that memory can be freed."""
    return not debt.ops and now - debt.used_at >= settings.evict_idle_s
