"""What a tenant used, by the hour and by the run, and what it changed. There are no prices here.

A tenant's webhook: where it wants to be notified of its events.
"""

from __future__ import annotations

from datetime import datetime  # pydantic reads it at run time
from typing import Annotated, Literal

from pydantic import Field

from cotrain.wire.model import WireModel

# ---- As the hosted services bill -----------------------------------------------------------------


class TrainingUsage(WireModel):
    """Tokens that went through forward or backward passes."""

    type: Literal["training"] = "training"
    token_count: int


class PrefillUsage(WireModel):
    """Prompt tokens: computed, or taken from what another request had computed (`cached`)."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampleUsage(WireModel):
    """Tokens that were generated."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointUsage(WireModel):
    """Checkpoints that were made."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


UsageInfo = Annotated[
    TrainingUsage | PrefillUsage | SampleUsage | CheckpointUsage, Field(discriminator="type")
]


class UsageEvent(WireModel):
    """What one session used of one kind in one hour. The prices are those of this server: none."""

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
    """What the client said about a session."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(WireModel):
    """GET billing/usage/events: by hour, then the largest first."""

    data: list[UsageEvent]
    sessions: dict[str, UsageSession] = Field(default={})
    cost_data_through: None = None


class StorageItem(WireModel):
    """What the checkpoints of one project hold now."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    """Of 10^9 bytes."""
    estimated_monthly_cost_usd: None = None


class StorageResponse(WireModel):
    """GET billing/usage/checkpoints/current."""

    effective_rate_usd_per_gigabyte_month: None = None
    data: list[StorageItem]


# ---- Our own -------------------------------------------------------------------------------------


class Amounts(WireModel):
    """What was used, in all."""

    training_tokens: int = 0
    device_s: float = 0.0
    """Seconds of the accelerator: a cycle's time, shared by tokens among those in it."""
    prefill_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no computing."""
    sampled_tokens: int = 0
    checkpoints: int = 0


class SourceUsage(WireModel):
    """What one run or sampler used."""

    source: str
    """The id of a run or of a sampler."""
    session_id: str
    base_model: str
    amounts: Amounts


class StoredBytes(WireModel):
    """What is kept for a tenant now, in bytes; each has a quota."""

    runs: int = 0
    """Of live runs: the state of each once in memory and twice on disk."""
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
    """Something that was changed or taken away."""

    timestamp: datetime
    event: str
    """`<resource>_<action>`."""
    event_details: dict[str, object] = Field(default={})
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(WireModel):
    """GET audit: of one day, oldest first."""

    entries: list[AuditLogEntry]


class SetWebhookRequest(WireModel):
    """PUT webhook."""

    url: Annotated[str, Field(min_length=1, max_length=2_000)]
    """`https://…`; `http://` where the operator allows private networks."""


class NewWebhook(WireModel):
    """What a webhook is signed with: shown once."""

    url: str
    secret: str
    """`whsec_` and base64 of the key of the HMAC."""


class Webhook(WireModel):
    """GET webhook: where events go, and what became of them since the webhook was first set."""

    url: str
    created_at: datetime
    waiting: int
    """Events that are not delivered yet."""
    delivered: int
    retried: int
    """Attempts that failed, and were followed by another."""
    given_up: int
    """Events that were tried for a day."""
    dropped: int
    """Events that came while 1,000 waited."""
    last_event: str | None = None
    last_outcome: str | None = None
    """`delivered`, `retried` or `given_up`."""
    last_answer: str | None = None
    """The status that the last attempt was answered with, or why it failed."""
    last_at: datetime | None = None


class WebhookRemoved(WireModel):
    """DELETE webhook."""

    type: Literal["webhook_removed"] = "webhook_removed"


class WebhookTest(WireModel):
    """POST webhook/test."""

    event_id: str
