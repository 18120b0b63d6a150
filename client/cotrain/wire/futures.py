"""The JSON shapes of a future that is polled for one at a time."""

from __future__ import annotations

from typing import Literal

from cotrain.errors import Category
from cotrain.wire.model import Name, WireModel


class UntypedAPIFuture(WireModel):
    """What every queued request is answered with at once: the id its result is asked for under."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class FutureRetrieveRequest(WireModel):
    """POST retrieve_future."""

    request_id: Name
    allow_metadata_only: bool = False


class TryAgainResponse(WireModel):
    """The result is not there yet; sent with status 408."""

    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"] = "active"
    queue_state_reason: str | None = None
    type: Literal["try_again"] = "try_again"


class RequestFailedResponse(WireModel):
    """The request failed; sent with status 200."""

    error: str
    category: Category
