"""Messages of the operator's API `/api/v1/admin/…`. Times are seconds since 1970."""

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

    worker: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """Id of a worker of the run's pool."""


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
    last_used_at: float | None
    """Time of the last use, to within a minute."""


class NewKey(KeyShown):
    """New key; the only message that contains its secret."""

    key: str


class TenantRow(WireModel):
    """Summary of a tenant."""

    id: str
    name: str
    weight: float
    paused: Pause | None
    runs: int
    """Live runs."""
    run_bytes: int
    ops: int
    """Pending ops in all pools; the next two fields also count all pools."""
    tokens: int
    samples: int
    """Sample requests that are waiting or running."""
    failed: int = 0
    """Failed ops and sample requests in the last 15 minutes."""
    refused: int = 0
    """Refused requests in the last 15 minutes."""


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
    is_own: bool
    """True if the operator set a limit for this tenant instead of the default."""
    used: int


class DayUsage(WireModel):
    """Usage of one day, in UTC."""

    day: str
    amounts: Amounts


class TenantDetail(TenantRow):
    """Tenant with its limits, keys and usage."""

    quotas: list[QuotaUse]
    usage: list[DayUsage]
    """Usage of the last days, oldest first; today is counted so far."""
    keys: list[KeyShown]
    paused_runs: dict[str, Pause]


class WorkerShown(WireModel):
    """State of a worker, including drained and unreachable ones."""

    pool: str
    base_model: str
    id: str
    state: str
    """`serving`, `draining`, `drained`, or `away`: no process sends a heartbeat."""
    drain_asked_at: float | None
    drain_waits: bool
    """The drain waits and the worker keeps its runs, because no other worker serves this base model."""
    heartbeat: dict[str, Any] | None
    open_steps: int
    last_exit: dict[str, Any] | None = None
    """Last crash or refused start: `at`, `count`, `reason`, and `since` it does not run. None without one."""


class SelfCheckAsked(WireModel):
    """Accepted request for a self-check of a worker."""

    asked_at: float
    """Time in s since the epoch; the worker reports its result with it."""


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
