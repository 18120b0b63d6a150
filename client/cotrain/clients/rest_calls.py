"""What a RestClient sends, and how it reads the answers."""

from __future__ import annotations

import json
import uuid
from base64 import urlsafe_b64decode
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel

from cotrain.errors import MalformedMessage, RequestFailed
from cotrain.transport.http import acknowledged, reader
from cotrain.wire.checkpoints import (
    CheckpointArchiveUrlResponse,
    CopyWeightsResponse,
    ParsedCheckpointTinkerPath,
    WhoamiResponse,
)
from cotrain.wire.model import WireModel
from cotrain.wire.rest import TraceExportResponse, TrainingRunsResponse
from cotrain.wire.sessions import AuthTokenResponse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date

    import httpx

    from cotrain.transport.http import Transport
    from cotrain.wire.checkpoints import CopyWeightsRequest

Model = TypeVar("Model", bound=BaseModel)

#: A server that is still drawing a timeline is asked again after this.
TRACE_POLL_S = 5.0
#: A link that expired longer ago is none: a login page is never to be kept. The clocks may differ by less.
CLOCKS_DIFFER = timedelta(days=1)


class Nothing(WireModel):
    """The body of a POST that its URL says it all."""


class RestCalls:
    """Calls in no run's order. All of them run on the client's own loop, and raise APIError."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def get(
        self, path: str, model: type[Model], **query: str | int | date | list[str] | None
    ) -> Model:
        """GET an answer; what is None is not asked for."""
        asked = {name: _text(value) for name, value in query.items() if value is not None}
        return await self._transport.get(f"{path}?{urlencode(asked, doseq=True)}", reader(model))

    async def post(
        self,
        path: str,
        message: BaseModel,
        model: type[Model],
        headers: Mapping[str, str] | None = None,
    ) -> Model:
        """POST a question and read its answer."""
        return await self._transport.post(path, message, reader(model), headers)

    async def post_empty(self, path: str) -> None:
        """POST to a URL that says it all."""
        await self._transport.post(path, Nothing(), acknowledged)

    async def put(self, path: str, message: BaseModel) -> None:
        """PUT."""
        await self._transport.put(path, message, acknowledged)

    async def put_for(self, path: str, message: BaseModel, model: type[Model]) -> Model:
        """PUT something and read what it gives."""
        return await self._transport.put(path, message, reader(model))

    async def patch(self, path: str, message: BaseModel, model: type[Model]) -> Model:
        """PATCH something and read what it is now."""
        return await self._transport.patch(path, message, reader(model))

    async def delete(self, path: str) -> None:
        """DELETE."""
        await self._transport.delete(path)

    async def training_run_ids(self, limit: int, offset: int) -> list[str]:
        """List the ids of one page of runs."""
        page = await self.get("training_runs", TrainingRunsResponse, limit=limit, offset=offset)
        return [run.training_run_id for run in page.training_runs]

    async def copy(self, wanted: CopyWeightsRequest) -> str:
        """Copy a checkpoint; one key for all attempts, so that what is asked for again is one copy."""
        once = {"X-Idempotency-Key": str(uuid.uuid4())}
        return (await self.post("copy_weights", wanted, CopyWeightsResponse, once)).tinker_path

    async def archive_url(self, checkpoint: str) -> CheckpointArchiveUrlResponse:
        """Ask where the tar of a checkpoint is: the server answers by sending us there."""
        return await self._transport.get(f"{checkpoint}/archive", _archive_link)

    async def trace_url(self, session_id: str) -> str:
        """Wait for a session's timeline. Raises RequestFailed where there is none to draw."""
        path = url_of("sessions", session_id, "trace_export")
        while (answer := await self.get(path, TraceExportResponse)).status == "pending":
            await self._transport.sleep(TRACE_POLL_S)
        if answer.url is None:
            raise RequestFailed(answer.error or "there is no timeline", session_id, "unknown")
        return answer.url

    async def whoami(self) -> WhoamiResponse:
        """Read whose the key is in a token that stands for it."""
        token = await self.post("auth/token", Nothing(), AuthTokenResponse)
        claims = _claims(token.jwt)
        return WhoamiResponse(
            user_urn=claims["sub"],
            org_urn=f"tml:organization:{claims['org_id']}",
            email=claims.get("email") or None,
        )


def url_of(*parts: str) -> str:
    """Join parts that may hold any character to a URL's path."""
    return "/".join(quote(part, safe="") for part in parts)


def checkpoint_url(tinker_path: str) -> str:
    """Write a checkpoint's path as the URL it has. Raises ValueError where it is none."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return url_of(
        "training_runs", parsed.training_run_id, "checkpoints", *parsed.checkpoint_id.split("/")
    )


def _archive_link(response: httpx.Response) -> CheckpointArchiveUrlResponse:
    """Read where the server sends us. Raises MalformedMessage for where a login page would."""
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
    """Read a token without checking it: it came straight from the server that made it."""
    try:
        content = jwt.split(".")[1]
        claims: dict[str, Any] = json.loads(urlsafe_b64decode(content + "=" * (-len(content) % 4)))
        return {"sub": claims["sub"], "org_id": claims["org_id"], "email": claims.get("email")}
    except (IndexError, KeyError, ValueError) as error:
        raise MalformedMessage("auth/token did not answer a token") from error
