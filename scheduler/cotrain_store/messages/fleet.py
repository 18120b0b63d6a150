"""The workers of a pool: where each one belongs, and what it last said about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import WorkerId


@dataclass(frozen=True)
class WorkerHeartbeat:
    """What a live worker says about itself."""

    id: WorkerId
    epoch: int
    state: str
    device: str
    tokens_per_s: float
    runs: int
    memory_bytes: int
    seen_at: float
    restored_ops: int = 0
    samples_running: int = 0
    samples_waiting: int = 0
    """Claimed, and not yet in the decoder's batch."""
    safe_tokens: int = 0
    """What one pass of the base model has memory for; less than was set up once memory ran out."""
    halvings: int = 0
    """How often that was."""
    host: str = ""
    parked_runs: int = 0
    """Of `runs`, those whose adapters are offloaded to host memory."""
    takes_saves: bool = True
    """False while its disk is too far behind: a save waits then, and its run behind it."""


@dataclass(frozen=True)
class WorkerSlot:
    """One worker id of a pool. Its process may be another one tomorrow."""

    worker: WorkerId
    epoch: int
    """Of the process that came last."""
    heartbeat: WorkerHeartbeat | None
    """None while no process has this id."""
