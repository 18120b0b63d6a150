"""Session of one client: opened on first use, kept active by heartbeats, finished once."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, Literal

from typing_extensions import override

from cotrain.errors import APIError, APIStatusError
from cotrain.transport.http import Transport
from cotrain.transport.responses import acknowledged, reader
from cotrain.version import __version__
from cotrain.wire.sessions import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishReason,
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

Outcome = Literal["success", "errored", "interrupted"]


class Session:
    """Session on one server. Runs on the client's own loop."""

    def __init__(
        self,
        transport: Transport,
        user_metadata: dict[str, Any] | None,
        *,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> None:
        self._transport = transport
        self._described = CreateSessionRequest(
            sdk_version=f"cotrain-{__version__}",
            user_metadata=user_metadata or {},
            project_id=project_id,
            display_name=display_name,
        )
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
                self._id = await self._open()
                self.heartbeat = asyncio.create_task(self._send_heartbeats(self._id))
        return self._id

    async def finish(self, outcome: Outcome, detail: str | None = None) -> None:
        """Report the end of the session. If the report is lost, the server ends it when heartbeats stop."""
        if self.heartbeat is not None:
            self.heartbeat.cancel()
        if self._id is None:
            return
        farewell = FinishSessionRequest(reason=FinishReason(type=outcome), detail=detail)
        with suppress(APIError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._transport.post_once(f"sessions/{self._id}/finish", farewell, acknowledged)

    async def _open(self) -> str:
        opened = await self._transport.post("create_session", self._described, reader(CreateSessionResponse))
        return opened.session_id

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
