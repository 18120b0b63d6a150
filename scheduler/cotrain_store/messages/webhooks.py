"""Records of webhooks and of their events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cotrain_store.messages.ids import TenantId


class Outcome(StrEnum):
    """Outcome of an attempt to deliver an event."""

    #: Answered with 2xx.
    DELIVERED = "delivered"
    #: Will be tried again later.
    RETRIED = "retried"
    #: Failed for a day.
    GIVEN_UP = "given_up"


@dataclass(frozen=True)
class WebhookRecord:
    """Address to which a tenant's events are delivered, and the counts of their outcomes."""

    url: str
    created_at: float
    waiting: int
    """Events that are not delivered yet."""
    delivered: int
    retried: int
    given_up: int
    dropped: int
    """Events that arrived while 1,000 waited."""
    last_event: str
    last_outcome: str
    last_answer: str
    """Status of the answer, or the reason why there was none."""
    last_at: float | None


@dataclass(frozen=True)
class DueEvent:
    """An event that is due for delivery."""

    tenant: TenantId
    url: str
    secret: str
    id: str
    body: bytes
    attempts: int
    """Number of earlier attempts."""
    age_s: float
