"""The shapes of an upload: an adapter that was made elsewhere becomes a checkpoint."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cotrain.types import UntypedAPIFuture
from cotrain.wire.model import Name, WireModel


class UploadQuery(WireModel):
    """POST training_runs/upload: what the archive in its body is to become, in the query."""

    base_model: Name
    name: Name
    """The checkpoint's name."""
    session_id: Name | None = None
    model_seq_id: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """With both, an upload that is sent again is the same one; without, it gets a session of its own."""
    ttl_seconds: int | None = None
    user_metadata: Annotated[str | None, Field(max_length=2**14)] = None
    """A JSON object of texts, kept with the checkpoint; an HTTP server takes no longer request line."""


class UploadResponse(UntypedAPIFuture):
    """The upload is queued: `request_id` resolves when the checkpoint is stored."""

    import_request_id: str
    """Resolves before, when the adapter fits its base model, or says why it does not."""
    path: str
    """Where the checkpoint will be."""


class UploadedResponse(WireModel):
    """POST checkpoints/upload: the upload is stored."""

    path: str
    """Where the checkpoint is."""
