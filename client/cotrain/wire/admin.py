"""Messages about a server as a whole: its admin API, its fleet and its status. Times are seconds since 1970.

The operator receives everything, a tenant its own part of the status. Fields only for the operator have a default
there; the server may send more fields.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from cotrain.wire.model import WireModel
from cotrain.wire.usage import Amounts

Role = Literal["member", "viewer"]
"""Permissions of a key for its tenant: everything, or read only."""
Printable = r"^[^\x00-\x1f\x7f-\x9f]*$"
KeyName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=Printable)]
Reason = Annotated[str, StringConstraints(max_length=200, pattern=Printable)]
MAX_DAYS = 3_650


# ---- /api/v1/admin/… ---------------------------------------------------------------------------------


class Change(WireModel):
    """Base of the operator's requests; an unknown field is rejected."""

    model_config = ConfigDict(**WireModel.model_config | {"extra": "forbid", "strict": True})


class KeyRequest(Change):
    """Request to create a key."""

    name: KeyName
    role: Role = "member"
    days: Annotated[float, Field(gt=0, le=MAX_DAYS)] | None = None
    """Days until the key expires; without, it is valid until it is revoked."""
    prefix: Literal["tml", "sk"] = "tml"


class PauseRequest(Change):
    """Reason for pausing a tenant or a run, shown to its clients."""

    reason: Reason = ""


class MoveRequest(Change):
    """Request to move a run to another worker."""

    worker: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]  # id of a worker of the run's pool


class Pause(WireModel):
    """Start and reason of the pause of a tenant or a run."""

    since: float
    reason: str


class KeyShown(WireModel):
    """API key without its secret."""

    id: str
    tenant: str
    name: str
    role: Role
    prefix: str
    source: str
    created_at: float
    not_after: float | None
    last_used_at: float | None  # time of the last use, to within a minute


class NewKey(KeyShown):
    """New key; the only message that contains its secret."""

    key: str


class TenantRow(WireModel):
    """Summary of a tenant."""

    id: str
    name: str
    weight: float
    paused: Pause | None
    runs: int  # live runs
    run_bytes: int
    ops: int  # pending ops in all pools; the next two fields also count all pools
    tokens: int
    samples: int  # sample requests that are waiting or running
    failed: int = 0  # failed ops and sample requests in the last 15 minutes
    refused: int = 0  # refused requests in the last 15 minutes


class TenantList(WireModel):
    """Page of tenants, sorted by name."""

    tenants: list[TenantRow]
    total: int
    offset: int
    limit: int


class QuotaUse(WireModel):
    """Limit of a tenant, and its current use."""

    name: str
    limit: int
    default: int
    is_own: bool  # True if the operator set a limit for this tenant instead of the default
    used: int


class DayUsage(WireModel):
    """Usage of one day, in UTC."""

    day: str
    amounts: Amounts


class TenantDetail(TenantRow):
    """Tenant with its limits, keys and usage."""

    quotas: list[QuotaUse]
    usage: list[DayUsage]  # usage of the last days, oldest first; today is counted so far
    keys: list[KeyShown]
    paused_runs: dict[str, Pause]


class WorkerShown(WireModel):
    """State of a worker, including drained and unreachable ones."""

    pool: str
    base_model: str
    id: str
    state: str  # `serving`, `draining`, `drained`, or `away`: no process sends a heartbeat
    drain_asked_at: float | None
    drain_waits: bool  # the drain waits and the worker keeps its runs, because no other worker serves this base model
    heartbeat: dict[str, Any] | None
    open_steps: int
    last_exit: dict[str, Any] | None = None
    """Last crash or refused start: `at`, `count`, `reason`, and `since` it does not run. None without one."""


class SelfCheckAsked(WireModel):
    """Accepted request for a self-check of a worker."""

    asked_at: float  # time in s since the epoch; the worker reports its result with it


class WorkerList(WireModel):
    """Workers of all pools."""

    workers: list[WorkerShown]


class AuditEvent(WireModel):
    """Entry of the audit log: the time, the key, and the tenant concerned."""

    id: str
    at: float
    event: str
    tenant: str
    key_id: str
    key_name: str
    details: dict[str, Any]


class AuditPage(WireModel):
    """Page of audit events, newest first; send `next` as `before` to get older ones."""

    events: list[AuditEvent]
    next: str | None


# ---- GET fleet: for each pool, the required and the running workers; for operators and autoscalers -----


class Restoring(WireModel):
    """Progress of a worker that restores runs from their logs."""

    runs_done: int
    runs: int
    ops_done: int  # number of replayed ops of all these runs
    ops: int

    @property
    def text(self) -> str:
        """Progress in words."""
        return f"{self.runs_done} of {self.runs} runs, {self.ops_done} of {self.ops} ops"


class FleetWorker(WireModel):
    """Live worker."""

    id: str
    state: str  # `serving`, `draining` or `drained`
    is_draining: bool  # True if the operator drains the worker, or its process is stopping
    restoring: Restoring | None = None  # progress of a restore; None if it restores no runs
    host: str
    device: str
    tokens_per_s: float  # measured training speed
    runs: int
    busy: float  # fraction of the last minute in which it computed, from 0 to 1, including sampling
    backlog_s: float  # time in s for the training that was pending for it when a worker of its pool was last idle


class FleetPool(WireModel):
    """Base model that is or was served, or that is configured on this server."""

    base_model: str
    pool: str | None  # pool id; None if no worker has served it yet
    workers_wanted: int
    workers_unavailable: list[str]  # ids of workers without a heartbeat that still own their runs
    workers: list[FleetWorker]
    ops: int  # training requests accepted and not done
    tokens: int  # tokens of training requests accepted and not run
    oldest_s: float  # age in s of the oldest runnable request
    backlog_s: float
    """Time in s that the live workers need for `tokens`; without workers, one worker at the last measured speed."""
    samples_waiting: int
    samples_running: int


class Fleet(WireModel):
    """State of every pool."""

    pools: list[FleetPool]


# ---- GET status: health and load of the server -------------------------------------------------------


class QueueStatus(WireModel):
    """Training requests that are accepted and not done."""

    ops: int
    tokens: int
    oldest_s: float = 0.0  # age in seconds of the oldest request that may run


class SamplesStatus(WireModel):
    """Number of sample requests."""

    waiting: int
    running: int


class TenantStatus(WireModel):
    """Unfinished requests of one tenant."""

    tenant: str
    tenant_name: str = ""  # name of its first key
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
    restoring: Restoring | None = None  # None: it restores no runs
    members: list[MemberStatus] = Field(default=[])  # processes of a group; empty for a worker of one process


class CycleRun(WireModel):
    """Part of one run in a cycle."""

    run: str
    tenant: str
    tenant_name: str = ""
    tokens: int
    ops: dict[str, int]  # number of ops for each kind


class CycleRecord(WireModel):
    """Finished cycle."""

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
    workers: int | list[WorkerStatus]  # a tenant receives only their number
    workers_unavailable: list[str] = Field(default=[])  # ids of workers without a heartbeat
    last_cycle: int
    open_cycles: int = 0
    queue: QueueStatus
    samples: SamplesStatus
    duty: dict[str, float] = Field(default={})
    """Fractions of the last minute that the devices spent on each activity (train, optim, sample, idle)."""
    tenants: list[TenantStatus] = Field(default=[])
    cycles: list[CycleRecord] = Field(default=[])  # last cycles, newest first


class ServerStatus(WireModel):
    """Status of the server and all its pools."""

    version: str
    uptime_s: float | None = None
    ready: bool | None = None
    reasons: list[str] = Field(default=[])  # reasons why it is not ready, as sentences
    pools: list[PoolStatus]
