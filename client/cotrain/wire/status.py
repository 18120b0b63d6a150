"""GET status: health and load of the server. The operator receives everything, a tenant its own part.

Fields only for the operator have a default here; the server may send more fields.

GET fleet: for each pool, the required number of workers and the state of the running ones. For the operator and
autoscalers.
"""

from pydantic import Field

from cotrain.wire.model import WireModel


class Restoring(WireModel):
    """Progress of a worker that restores runs from their logs."""

    runs_done: int
    runs: int
    ops_done: int
    """Number of replayed ops of all these runs."""
    ops: int

    @property
    def text(self) -> str:
        """Progress in words."""
        return f"{self.runs_done} of {self.runs} runs, {self.ops_done} of {self.ops} ops"


class FleetWorker(WireModel):
    """Live worker."""

    id: str
    state: str
    """`serving`, `draining` or `drained`."""
    is_draining: bool
    """True if the operator drains the worker, or its process is stopping."""
    restoring: Restoring | None = None
    """Progress of a restore; None if it restores no runs."""
    host: str
    device: str
    tokens_per_s: float
    """Measured training speed."""
    runs: int
    busy: float
    """Fraction of the last minute in which it computed, from 0 to 1, including sampling."""
    backlog_s: float
    """Time in s for the training that was pending for it when a worker of its pool was last idle."""


class FleetPool(WireModel):
    """Base model that is or was served, or that is configured on this server."""

    base_model: str
    pool: str | None
    """Pool id; None if no worker has served it yet."""
    workers_wanted: int
    workers_unavailable: list[str]
    """Ids of workers without a heartbeat that still own their runs."""
    workers: list[FleetWorker]
    ops: int
    """Training requests accepted and not done."""
    tokens: int
    """Tokens of training requests accepted and not run."""
    oldest_s: float
    """Age in s of the oldest runnable request."""
    backlog_s: float
    """Time in s that the live workers need for `tokens`; without workers, one worker at the last measured speed."""
    samples_waiting: int
    samples_running: int


class Fleet(WireModel):
    """State of every pool."""

    pools: list[FleetPool]


class QueueStatus(WireModel):
    """Training requests that are accepted and not done."""

    ops: int
    tokens: int
    oldest_s: float = 0.0
    """Age in seconds of the oldest request that may run."""


class SamplesStatus(WireModel):
    """Number of sample requests."""

    waiting: int
    running: int


class TenantStatus(WireModel):
    """Unfinished requests of one tenant."""

    tenant: str
    tenant_name: str = ""
    """Name of its first key."""
    ops: int
    tokens: int
    bytes: int
    samples_waiting: int = 0
    samples_running: int = 0


class MemberStatus(WireModel):
    """Runs and memory of one process of a group."""

    runs: int
    memory_bytes: int


class WorkerStatus(WireModel):
    """Heartbeat of a live worker."""

    id: str
    state: str
    device: str
    tokens_per_s: float
    runs: int
    memory_bytes: int
    restoring: Restoring | None = None
    """None: it restores no runs."""
    members: list[MemberStatus] = Field(default=[])
    """Processes of a group; empty for a worker of one process."""


class CycleRun(WireModel):
    """Part of one run in a cycle."""

    run: str
    tenant: str
    tenant_name: str = ""
    tokens: int
    ops: dict[str, int]
    """Number of ops for each kind."""


class CycleRecord(WireModel):
    """Finished cycle. Times are seconds since 1970."""

    cycle: int
    worker: str
    started_at: float
    duration_ms: float
    tokens: int
    outcome: str
    runs: list[CycleRun]


class PoolStatus(WireModel):
    """State of a base model and its workers."""

    base_model: str
    workers: int | list[WorkerStatus]
    """A tenant receives only their number."""
    last_cycle: int
    open_cycles: int = 0
    queue: QueueStatus
    samples: SamplesStatus
    duty: dict[str, float] = Field(default={})
    """Fractions of the last minute that the devices spent on each activity (train, optim, sample, idle)."""
    tenants: list[TenantStatus] = Field(default=[])
    cycles: list[CycleRecord] = Field(default=[])
    """Last cycles, newest first."""


class ServerStatus(WireModel):
    """Status of the server and all its pools."""

    version: str
    uptime_s: float | None = None
    ready: bool | None = None
    reasons: list[str] = Field(default=[])
    """Reasons why it is not ready, as sentences."""
    pools: list[PoolStatus]
