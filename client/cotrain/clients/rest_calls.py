"""Requests of a `RestClient`: their paths, their bodies, and their responses. They open no session."""

import json
import uuid
from base64 import urlsafe_b64decode
from datetime import UTC, date, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel

from cotrain.errors import MalformedMessage, RequestFailed
from cotrain.transport.http import Transport
from cotrain.transport.responses import reader
from cotrain.wire.checkpoints import (
    CheckpointArchiveUrlResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ParsedCheckpointTinkerPath,
    WhoamiResponse,
)
from cotrain.wire.model import WireModel
from cotrain.wire.rest import TraceExportResponse, TrainingRunsResponse
from cotrain.wire.sessions import AuthTokenResponse

Model = TypeVar("Model", bound=BaseModel)

#: Interval between requests for a timeline that the server is still drawing.
TRACE_POLL_S = 5.0
#: A link that expired longer ago than this is rejected, so that a login page is never saved as an archive.
#: The clocks of client and server may differ by less.
CLOCKS_DIFFER = timedelta(days=1)


class Nothing(WireModel):
    """Empty request body."""


async def get(
    transport: Transport, path: str, model: type[Model], **query: str | int | date | list[str] | None
) -> Model:
    """GET a resource. Query parameters that are None are left out. Raises APIError."""
    asked = {name: _text(value) for name, value in query.items() if value is not None}
    return await transport.get(f"{path}?{urlencode(asked, doseq=True)}", reader(model))


async def training_run_ids(transport: Transport, limit: int, offset: int) -> list[str]:
    """Return the ids of one page of runs."""
    page = await get(transport, "training_runs", TrainingRunsResponse, limit=limit, offset=offset)
    return [run.training_run_id for run in page.training_runs]


async def copy(transport: Transport, wanted: CopyWeightsRequest) -> str:
    """Copy a checkpoint. All attempts send the same idempotency key, so a retry makes no second copy."""
    once = {"X-Idempotency-Key": str(uuid.uuid4())}
    made = await transport.post("copy_weights", wanted, reader(CopyWeightsResponse), once)
    return made.tinker_path


async def archive_url(transport: Transport, checkpoint: str) -> CheckpointArchiveUrlResponse:
    """Return the URL of the tar of a checkpoint; the server sends it as a redirect."""
    return await transport.get(f"{checkpoint}/archive", _archive_link)


async def trace_url(transport: Transport, session_id: str) -> str:
    """Poll until a session's timeline is drawn, and return its URL.

    Raises RequestFailed if the session has no timeline.
    """
    path = url_of("sessions", session_id, "trace_export")
    while (answer := await get(transport, path, TraceExportResponse)).status == "pending":
        await transport.sleep(TRACE_POLL_S)
    if answer.url is None:
        raise RequestFailed(answer.error or "there is no timeline", session_id, "unknown")
    return answer.url


async def whoami(transport: Transport) -> WhoamiResponse:
    """Return the owner of the API key, from a token that the server issues for it."""
    token = await transport.post("auth/token", Nothing(), reader(AuthTokenResponse))
    claims = _claims(token.jwt)
    return WhoamiResponse(
        user_urn=claims["sub"], org_urn=f"tml:organization:{claims['org_id']}", email=claims.get("email") or None
    )


def url_of(*parts: str) -> str:
    """Return a URL path of parts that may contain any character."""
    return "/".join(quote(part, safe="") for part in parts)


def checkpoint_url(tinker_path: str) -> str:
    """Return the URL path of a checkpoint. Raises ValueError if `tinker_path` is malformed."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return url_of("training_runs", parsed.training_run_id, "checkpoints", *parsed.checkpoint_id.split("/"))


def _archive_link(response: httpx.Response) -> CheckpointArchiveUrlResponse:
    """Parse a redirect to an archive. Raises MalformedMessage for a redirect to a login page."""
    try:
        expires = parsedate_to_datetime(response.headers["Expires"])
        link = CheckpointArchiveUrlResponse(url=response.headers["Location"], expires=expires)
    except (KeyError, ValueError) as error:
        raise MalformedMessage(f"{response.url} did not answer where the archive is") from error
    if expires < datetime.now(UTC) - CLOCKS_DIFFER:
        raise MalformedMessage(f"{response.url} did not answer where the archive is")
    return link


def _text(value: str | int | date | list[str]) -> str | list[str]:
    if isinstance(value, list):
        return value
    return str(value) if isinstance(value, str | int) else value.isoformat()


def _claims(jwt: str) -> dict[str, Any]:
    """Parse a token without verifying it: it comes directly from the server that issued it."""
    try:
        content = jwt.split(".")[1]
        claims: dict[str, Any] = json.loads(urlsafe_b64decode(content + "=" * (-len(content) % 4)))
        return {"sub": claims["sub"], "org_id": claims["org_id"], "email": claims.get("email")}
    except (IndexError, KeyError, ValueError) as error:
        raise MalformedMessage("auth/token did not answer a token") from error
