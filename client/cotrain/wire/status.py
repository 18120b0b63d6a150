"""GET status: how the server is. The operator is shown everything, a tenant its own part.

What only the operator is shown has a default here; the server may show more than is named.

GET fleet: how many workers each pool is to have, and what those do that there are. For the operator, and what scales for them.
"""

from __future__ import annotations

from pydantic import Field

from cotrain.wire.model import WireModel


class Restoring(WireModel):
    """The progress of a worker that restores runs from their logs."""

    runs_done: int
    runs: int
    ops_done: int
    """Of the logs of all these runs."""
    ops: int

    @property
    def text(self) -> str:
        """Return it in words."""
        return f"{self.runs_done} of {self.runs} runs, {self.ops_done} of {self.ops} ops"


class FleetWorker(WireModel):
    """A living worker."""

    id: str
    state: str
    """`serving`, `draining` or `drained`."""
    is_draining: bool
    """The operator wants it drained, or its process is to end."""
    restoring: Restoring | None = None
    """None: it restores no runs."""
    host: str
    device: str
    tokens_per_s: float
    """Measured, of training."""
    runs: int
    busy: float
    """What it computed of the last minute, from 0 to 1, sampling included."""
    backlog_s: float
    """Time that it needs for the training that waited for it when a worker of its pool was last free."""


class FleetPool(WireModel):
    """A base model that is or was served, or that this server is set to serve."""

    base_model: str
    pool: str | None
    """None: no worker has served it yet."""
    workers_wanted: int
    workers_unavailable: list[str]
    """Ids whose process gives no heartbeat, and whose runs are still theirs."""
    workers: list[FleetWorker]
    ops: int
    """Training requests that are accepted and not done."""
    tokens: int
    """Of those that are accepted and not run."""
    oldest_s: float
    """Age of the oldest request that can be run."""
    backlog_s: float
    """Time that the workers there are need for `tokens`; without one, that of one as it was measured last."""
    samples_waiting: int
    samples_running: int


class Fleet(WireModel):
    """All pools."""

    pools: list[FleetPool]


class QueueStatus(WireModel):
    """Training requests that are accepted and not done."""

    ops: int
    tokens: int
    oldest_s: float = 0.0
    """Age of the oldest that may run."""


class SamplesStatus(WireModel):
    """Sample requests."""

    waiting: int
    running: int


class TenantStatus(WireModel):
    """What one tenant has accepted and not yet got back."""

    tenant: str
    tenant_name: str = ""
    """The name of its first key."""
    ops: int
    tokens: int
    bytes: int
    samples_waiting: int = 0
    samples_running: int = 0


class MemberStatus(WireModel):
    """What one process of a group holds."""

    runs: int
    memory_bytes: int


class WorkerStatus(WireModel):
    """What a live worker says about itself."""

    id: str
    state: str
    device: str
    tokens_per_s: float
    runs: int
    memory_bytes: int
    restoring: Restoring | None = None
    """None: it restores no runs."""
    members: list[MemberStatus] = Field(default=[])
    """Of a group; none where a worker is one process."""


class CycleRun(WireModel):
    """What one run did in a cycle."""

    run: str
    tenant: str
    tenant_name: str = ""
    tokens: int
    ops: dict[str, int]
    """Kind of op → how many."""


class CycleRecord(WireModel):
    """One cycle that is over. Times are seconds since 1970."""

    cycle: int
    worker: str
    started_at: float
    duration_ms: float
    tokens: int
    outcome: str
    runs: list[CycleRun]


class PoolStatus(WireModel):
    """One base model and its workers."""

    base_model: str
    workers: int | list[WorkerStatus]
    """A tenant sees how many there are."""
    last_cycle: int
    open_cycles: int = 0
    queue: QueueStatus
    samples: SamplesStatus
    duty: dict[str, float] = Field(default={})
    """What the devices did in the last minute (train, optim, sample, idle), as parts of it."""
    tenants: list[TenantStatus] = Field(default=[])
    cycles: list[CycleRecord] = Field(default=[])
    """The last ones, newest first."""


class ServerStatus(WireModel):
    """All of it."""

    version: str
    uptime_s: float | None = None
    ready: bool | None = None
    reasons: list[str] = Field(default=[])
    """Why it is not ready, in sentences."""
    pools: list[PoolStatus]
