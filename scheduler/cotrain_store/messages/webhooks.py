"""Events of webhooks that are due, and the outcomes of their delivery."""

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
class DueEvent:
    """An event that is due for delivery."""

    tenant: TenantId
    url: str
    secret: str
    id: str
    body: bytes
    attempts: int  # number of earlier attempts
    age_s: float
