"""Decide when a run needs a recovery copy, and when it may leave memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: A log longer than this is cut however cheap its replay: a run that only evaluates would otherwise
#: keep a line for every forward it ever asked for.
LOG_ENTRIES = 4_096
#: For every second of writing copies of a run, at least so many of training it.
COPY_SHARE = 10.0


@dataclass
class ReplayBacklog:
    """What would have to be done again for one run if this worker died now."""

    seq: int
    """The last committed seq: what a copy taken now would cover."""
    ops: int = 0
    bytes: int = 0
    compute_s: float = 0.0
    used_at: float = 0.0
    entries: int = 0
    """Places in the log since the last copy, those included that changed nothing."""
    copy_s: float = 0.0
    """What the last copy took to write."""

    def add(self, seq: int, size: int, compute_s: float, now: float) -> None:
        """Count one committed op."""
        self.pass_by(seq, now)
        self.ops += 1
        self.bytes += size
        self.compute_s += compute_s

    def pass_by(self, seq: int, now: float) -> None:
        """Count one committed op that changed nothing."""
        self.seq, self.used_at = seq, now
        self.entries += 1


@dataclass(frozen=True)
class SnapshotPolicy:
    """When a run is copied out, and when it leaves memory. An operator sets `replay_s`, and no more."""

    replay_s: float = 30.0
    """Copy a run out once replaying its log would take this long…"""
    ops: int = 512
    """… or run so many ops…"""
    bytes: int = 256 * 1024**2
    """… or read so many bytes of bodies."""
    idle_s: float = 600.0
    """Copy a run out that changed and then rested this long."""
    evict_idle_s: float = 1800.0
    """Drop a run that rested this long from memory; its next request brings it back."""

    def due_s(self, backlog: ReplayBacklog) -> float:
        """Return at how much training a copy is due, in s."""
        return max(self.replay_s, COPY_SHARE * backlog.copy_s)

    def needs_snapshot(self, backlog: ReplayBacklog, now: float) -> bool:
        """Tell whether replaying would take too long, too much disk, or the run is at rest."""
        if backlog.entries >= LOG_ENTRIES:
            return True
        if not backlog.ops:
            return False
        return (
            backlog.compute_s >= self.due_s(backlog)
            or backlog.ops >= self.ops
            or backlog.bytes >= self.bytes
            or now - backlog.used_at >= self.idle_s
        )

    def may_evict(self, backlog: ReplayBacklog, now: float) -> bool:
        """Tell whether a run has rested so long, with nothing to replay, that memory can be freed."""
        return not backlog.ops and now - backlog.used_at >= self.evict_idle_s
