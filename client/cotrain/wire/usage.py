"""Messages of usage by hour and by run, of the audit log, and of webhooks. This server has no prices."""

from datetime import datetime  # pydantic reads it at run time
from typing import Annotated, Literal

from pydantic import Field

from cotrain.wire.model import WireModel

__all__ = ["AuditLogEntry", "AuditLogResponse", "BillingUsageResponse"]

# ---- In the billing format of the hosted services ------------------------------------------------


class TrainingUsage(WireModel):
    """Tokens processed by forward or backward passes."""

    type: Literal["training"] = "training"
    token_count: int


class PrefillUsage(WireModel):
    """Prompt tokens: computed, or reused from another request (`cached`)."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampleUsage(WireModel):
    """Generated tokens."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointUsage(WireModel):
    """Number of created checkpoints."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


UsageInfo = Annotated[TrainingUsage | PrefillUsage | SampleUsage | CheckpointUsage, Field(discriminator="type")]


class UsageEvent(WireModel):
    """Usage of one kind by one session in one hour. This server has no prices."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: None = None
    effective_rate_usd_per_million_tokens: None = None
    effective_rate_usd_per_gigabyte_month: None = None
    event_info: UsageInfo


class UsageSession(WireModel):
    """Metadata that the client set for a session."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(WireModel):
    """GET billing/usage/events: by hour, then the largest first."""

    data: list[UsageEvent]
    sessions: dict[str, UsageSession] = Field(default={})
    cost_data_through: None = None


class StorageItem(WireModel):
    """Current checkpoint storage of one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    """Size in units of 10^9 bytes."""
    estimated_monthly_cost_usd: None = None


class StorageResponse(WireModel):
    """GET billing/usage/checkpoints/current."""

    effective_rate_usd_per_gigabyte_month: None = None
    data: list[StorageItem]


# ---- In cotrain's own format ---------------------------------------------------------------------


class Amounts(WireModel):
    """Total usage."""

    training_tokens: int = 0
    device_s: float = 0.0
    """Seconds of the accelerator: the time of each cycle is divided among its runs by tokens."""
    prefill_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    sampled_tokens: int = 0
    checkpoints: int = 0


class SourceUsage(WireModel):
    """Usage of one run or sampler."""

    source: str
    """Id of a run or of a sampler."""
    session_id: str
    base_model: str
    amounts: Amounts


class StoredBytes(WireModel):
    """Bytes currently stored for a tenant; each field has a quota."""

    runs: int = 0
    """State of live runs, counted once in memory and twice on disk."""
    checkpoints: int = 0
    unread: int = 0
    """Results that were never fetched."""


class UsageResponse(WireModel):
    """GET usage: of a tenant, and of each of its runs and samplers, the most device time first."""

    starting_on: datetime
    ending_before: datetime
    total: Amounts
    sources: list[SourceUsage]
    stored: StoredBytes = StoredBytes()


# ---- Audit ---------------------------------------------------------------------------------------


class AuditLogEntry(WireModel):
    """Change or deletion recorded in the audit log."""

    timestamp: datetime
    event: str
    """`<resource>_<action>`."""
    event_details: dict[str, object] = Field(default={})
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(WireModel):
    """GET audit: entries of one day, oldest first."""

    entries: list[AuditLogEntry]


class SetWebhookRequest(WireModel):
    """PUT webhook."""

    url: Annotated[str, Field(min_length=1, max_length=2_000)]
    """`https://…`; `http://` if the operator allows private networks."""
    drift_above: Annotated[float, Field(gt=0)] | None = None
    """Mean rollout gap in nats above which a pass causes an event `run.drift`. None: no such events."""


class NewWebhook(WireModel):
    """New webhook with its signing secret, which is shown only once."""

    url: str
    secret: str
    """`whsec_` and base64 of the HMAC key."""


class Webhook(WireModel):
    """GET webhook: its URL, and the state of deliveries since the webhook was first set."""

    url: str
    drift_above: float | None = None
    created_at: datetime
    waiting: int
    """Events that are not delivered yet."""
    delivered: int
    retried: int
    """Failed attempts that were followed by another."""
    given_up: int
    """Events whose delivery failed for a day."""
    dropped: int
    """Events that arrived while 1,000 were waiting."""
    last_event: str | None = None
    last_outcome: str | None = None
    """`delivered`, `retried` or `given_up`."""
    last_answer: str | None = None
    """HTTP status of the last attempt, or the reason why it failed."""
    last_at: datetime | None = None


class WebhookRemoved(WireModel):
    """DELETE webhook."""

    type: Literal["webhook_removed"] = "webhook_removed"


class WebhookTest(WireModel):
    """POST webhook/test."""

    event_id: str
