"""The workers of a pool: where each one belongs, and what it last said about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import WorkerId


@dataclass(frozen=True)
class WorkerHeartbeat:
    """What a live worker says about itself."""

    id: WorkerId
    epoch: int
    state: str
    """`serving`; `draining` from the operator's request on, or once its process is to end; `drained` once nothing is
    left here."""
    device: str
    tokens_per_s: float
    runs: int
    memory_bytes: int
    seen_at: float
    restored_ops: int = 0
    samples_running: int = 0
    samples_waiting: int = 0
    """Claimed, and not yet in the decoder's batch."""
    sample_tokens_per_s: float = 0.0
    """What sample requests got lately while there were any, prompts included; 0: not known yet."""
    safe_tokens: int = 0
    """What one pass of the base model has memory for; less than was set up once memory ran out."""
    halvings: int = 0
    """How often that was."""
    lora: str = ""
    """What computes LoRA, as its numerics name it: fused, auto, grouped or seg."""
    lora_fallback: str = ""
    """Why it is not the fastest that there is for a GPU; empty where it is."""
    host: str = ""
    parked_runs: int = 0
    """Of `runs`, those whose adapters are offloaded to host memory."""
    hands_over: bool = False
    """It is to be drained, and another worker is there; or its process is to end. Nothing is planned for it."""
    takes_saves: bool = True
    """False while its disk is too far behind: a save waits then, and its run behind it."""
    device_seconds: dict[str, float] = field(default_factory=dict)
    """Phase (train, optim, sample, idle) → s since the process began; they add up to that time."""
    duty: dict[str, float] = field(default_factory=dict)
    """Phase → its part of the last minute; they add up to 1."""
    device_memory_bytes: int = 0
    """In use on the device, by anything; 0 on a CPU."""
    device_memory_limit_bytes: int = 0
    kv_cache_ratio: float | None = None
    """Of the pages for keys and values, the part that sequences hold; None: another server samples."""
    adapters: dict[str, int] = field(default_factory=dict)
    """Where in memory (device, host) → how many adapters."""
    adapter_bytes: dict[str, int] = field(default_factory=dict)
    """The same → their bytes."""
    adapter_limit_bytes: int = 0
    """What adapters may take of the device; 0: no limit."""
    unstored_bytes: int = 0
    """Saved weights that are not on disk yet."""
    snapshot_age_s: float = 0.0
    """Training that no recovery copy holds, in s of computing, of the run with the most."""
    snapshot_due_s: float = 0.0
    """At how much of it a copy of that run is due."""
    members: list[dict[str, int]] = field(default_factory=list)
    """Of a group, what each of its processes holds: `runs` and `memory_bytes`; none where a worker is one process."""


@dataclass(frozen=True)
class WorkerSlot:
    """One worker id of a pool. Its process may be another one tomorrow."""

    worker: WorkerId
    epoch: int
    """Of the process that came last."""
    heartbeat: WorkerHeartbeat | None
    """None while no process has this id."""
