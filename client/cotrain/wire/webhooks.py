"""A tenant's webhook: where it wants to be notified of its events."""

from __future__ import annotations

from datetime import datetime  # pydantic reads it at run time
from typing import Annotated, Literal

from pydantic import Field

from cotrain.wire.model import WireModel


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
