"""What a webhook is, and what it is notified of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cotrain_store.messages.ids import TenantId


class Outcome(StrEnum):
    """What became of an attempt to deliver an event."""

    #: Answered with 2xx.
    DELIVERED = "delivered"
    #: It is tried again later.
    RETRIED = "retried"
    #: It was tried for a day.
    GIVEN_UP = "given_up"


@dataclass(frozen=True)
class WebhookRecord:
    """Where a tenant wants to be notified of its events, and what became of those."""

    url: str
    created_at: float
    waiting: int
    """Events that are not delivered yet."""
    delivered: int
    retried: int
    given_up: int
    dropped: int
    """Events that came while 1,000 waited."""
    last_event: str
    last_outcome: str
    last_answer: str
    """The status of the answer, or why there was none."""
    last_at: float | None


@dataclass(frozen=True)
class DueEvent:
    """An event whose turn it is."""

    tenant: TenantId
    url: str
    secret: str
    id: str
    body: bytes
    attempts: int
    """Made before."""
    age_s: float
