"""Connections on which nothing is asked: how long one may stay, and how many there may be.

uvicorn waits for the rest of a request's head as long as there is a connection, so that a client
without a key could occupy every one that this process may have.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, cast

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

#: From the first byte of a request's head to its last; from connecting to that first byte, too.
HEAD_TIMEOUT_S = 30.0


class ImpatientProtocol(H11Protocol):
    """Closes a connection whose next request has begun and does not come to its end.

    Between requests uvicorn's own `timeout_keep_alive` holds; the body is for the routes, but what
    still arrives of one when its request was answered is part of no request.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._begin_to_wait()

    @override
    def data_received(self, data: bytes) -> None:
        """Wait on while no request is there to answer."""
        super().data_received(data)
        if self._is_answering():
            self._end_waiting()
        else:
            self._begin_to_wait()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._end_waiting()
        super().connection_lost(exc)

    def _begin_to_wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _end_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete


def allow_many_connections() -> None:
    """Take as many file descriptors as the host grants: shells give 1,024, and a poll holds one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
