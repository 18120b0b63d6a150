"""What the operator reads and changes over HTTP: `/api/v1/admin/…`. Times are seconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from cotrain.wire.model import WireModel
from cotrain.wire.usage import Amounts

Role = Literal["member", "viewer"]
"""What a key may do for its tenant: everything, or read."""
Printable = r"^[^\x00-\x1f\x7f-\x9f]*$"
KeyName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=Printable)]
Reason = Annotated[str, StringConstraints(max_length=200, pattern=Printable)]
MAX_DAYS = 3_650


class Change(WireModel):
    """What the operator sends; a field that is none is refused."""

    model_config = ConfigDict(**WireModel.model_config | {"extra": "forbid", "strict": True})


class KeyRequest(Change):
    """A key that is to be made."""

    name: KeyName
    role: Role = "member"
    days: Annotated[float, Field(gt=0, le=MAX_DAYS)] | None = None
    """After which it is good no more; without, it is good until it is revoked."""
    prefix: Literal["tml", "sk"] = "tml"


class PauseRequest(Change):
    """Why a tenant or run is held back; its clients read it."""

    reason: Reason = ""


class MoveRequest(Change):
    """Where a run shall go on."""

    worker: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    """The id of a worker of its pool."""


class Pause(WireModel):
    """Since when a tenant or a run is held back, and why."""

    since: float
    reason: str


class KeyShown(WireModel):
    """An API key without its secret."""

    id: str
    tenant: str
    name: str
    role: Role
    prefix: str
    source: str
    created_at: float
    not_after: float | None
    last_used_at: float | None
    """To within a minute."""


class NewKey(KeyShown):
    """A key that was just made: only here its secret is seen."""

    key: str


class TenantRow(WireModel):
    """A tenant at a glance."""

    id: str
    name: str
    weight: float
    paused: Pause | None
    runs: int
    """Live ones."""
    run_bytes: int
    ops: int
    """Waiting, in all pools; so are the next two."""
    tokens: int
    samples: int
    """Waiting or running."""


class TenantList(WireModel):
    """Tenants by name."""

    tenants: list[TenantRow]
    total: int
    offset: int
    limit: int


class QuotaUse(WireModel):
    """One limit of a tenant, and how much of it is used."""

    name: str
    limit: int
    default: int
    is_own: bool
    """The operator gave this tenant another one than the default."""
    used: int


class DayUsage(WireModel):
    """What was used on one day, in UTC."""

    day: str
    amounts: Amounts


class TenantDetail(TenantRow):
    """A tenant with its limits, its keys and what it used."""

    quotas: list[QuotaUse]
    usage: list[DayUsage]
    """Of the last days, oldest first; today counts up to now."""
    keys: list[KeyShown]
    paused_runs: dict[str, Pause]


class WorkerShown(WireModel):
    """A worker, also one that is drained or does not answer."""

    pool: str
    base_model: str
    id: str
    state: str
    """`serving`, `draining`, `drained`, or `away`: no process gives a heartbeat."""
    drain_asked_at: float | None
    drain_waits: bool
    """It is to be drained, and keeps its runs: no other worker serves this base model."""
    heartbeat: dict[str, Any] | None
    open_steps: int


class WorkerList(WireModel):
    """All workers of all pools."""

    workers: list[WorkerShown]


class AuditEvent(WireModel):
    """One act: when, by which key, about whom."""

    id: str
    at: float
    event: str
    tenant: str
    key_id: str
    key_name: str
    details: dict[str, Any]


class AuditPage(WireModel):
    """Acts, newest first; `next` is to be sent as `before` for those that came earlier."""

    events: list[AuditEvent]
    next: str | None
