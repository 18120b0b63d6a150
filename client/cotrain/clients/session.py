"""Session of one client: opened on first use, kept active by heartbeats, and finished once."""

import asyncio
import itertools
import logging
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from typing_extensions import override

from cotrain.clients.sampling import SamplingClient
from cotrain.errors import APIError, APIStatusError
from cotrain.requests.connection import Connection
from cotrain.transport.responses import acknowledged, reader
from cotrain.version import __version__
from cotrain.wire.rest import FinishReason, FinishReasonType
from cotrain.wire.sampling import CreateSamplingSessionRequest, CreateSamplingSessionResponse, GetSamplerResponse
from cotrain.wire.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
)

log = logging.getLogger("cotrain")

HEARTBEAT_EVERY_S = 10.0
# A server ends a session after two minutes without a heartbeat; warn at that time.
WARN_AFTER_MISSED = 12

# Maximum time to report the end of the session, so that closing a client does not hang with the server.
FAREWELL_S = 5.0


class Session:
    """Session on one server, and the numbers of its runs and samplers.

    Its methods run on the client's own loop.
    """

    def __init__(
        self,
        connection: Connection,
        user_metadata: dict[str, Any] | None,
        *,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> None:
        self.connection = connection
        self._transport = connection.transport
        self._create_request = CreateSessionRequest(
            sdk_version=f"cotrain-{__version__}",
            user_metadata=user_metadata or {},
            project_id=project_id,
            display_name=display_name,
        )
        self.run_numbers = itertools.count()  # the next `model_seq_id`s
        self.sampler_numbers = itertools.count()  # the next `sampling_session_seq_id`s
        self._opening = asyncio.Lock()
        self._id: str | None = None
        self.heartbeat: asyncio.Task[None] | None = None
        """Sends heartbeats while the session is open."""

    @override
    def __repr__(self) -> str:
        return f"session {self._id}" if self._id else "no session yet"

    async def id(self) -> str:
        """Return the session's id; the first call opens the session."""
        async with self._opening:
            if self._id is None:
                opened = await self._transport.post(
                    "create_session", self._create_request, reader(CreateSessionResponse)
                )
                self._id = opened.session_id
                self.heartbeat = asyncio.create_task(self._send_heartbeats(self._id))
        return self._id

    async def finish(self, outcome: FinishReasonType, detail: str | None = None) -> None:
        """Report the end of the session. If the report is lost, the server ends it when heartbeats stop."""
        if self.heartbeat is not None:
            self.heartbeat.cancel()
        if self._id is None:
            return
        farewell = FinishSessionRequest(reason=FinishReason(type=outcome), detail=detail)
        with suppress(APIError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._transport.post_once(f"sessions/{self._id}/finish", farewell, acknowledged)

    async def reserve_run(self) -> tuple[str, int]:
        """Return the `session_id` and the next `model_seq_id`."""
        await self.connection.config()  # first, because it checks that this is a compatible server
        return await self.id(), next(self.run_numbers)

    async def create_sampler(self, *, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """Create a sampler of saved weights, or of a base model. Raises APIError."""
        request = CreateSamplingSessionRequest(
            session_id=await self.id(),
            sampling_session_seq_id=next(self.sampler_numbers),
            base_model=base_model,
            model_path=model_path,
        )
        made = await self._transport.post("create_sampling_session", request, reader(CreateSamplingSessionResponse))
        sampler_id = made.sampling_session_id
        if model_path is not None or base_model is None:
            found = await self._transport.get(f"samplers/{quote(sampler_id)}", reader(GetSamplerResponse))
            base_model = found.base_model
        return await self.sampler(sampler_id, base_model)

    async def sampler(self, sampler_id: str, base_model: str) -> SamplingClient:
        """Return the client of an existing sampler."""
        config = await self.connection.config()
        return SamplingClient(
            self.connection, sampler_id, base_model, polls_in_batches=config.sample_use_retrieve_futures
        )

    async def _send_heartbeats(self, session_id: str) -> None:
        missed = 0
        while True:
            await self._transport.sleep(HEARTBEAT_EVERY_S)
            try:
                await self._transport.post_once(
                    "session_heartbeat",
                    SessionHeartbeatRequest(session_id=session_id),
                    reader(SessionHeartbeatResponse),
                )
                missed = 0
            except APIError as error:
                missed += 1
                if _is_final(error):
                    log.warning("the server has ended session %s: %s", session_id, error)
                    return
                if missed == WARN_AFTER_MISSED:
                    log.warning("%d heartbeats of session %s missed: %s", missed, session_id, error)


def _is_final(error: APIError) -> bool:
    # The server rejects with JSON; a proxy's page implies nothing about the session.
    return (
        isinstance(error, APIStatusError) and error.status_code in (401, 403, 404, 410) and isinstance(error.body, dict)
    )
