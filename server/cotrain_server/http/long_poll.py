"""Answers that are not there yet: a route says what to wait for, and the edge waits.

Thousands of polls are held at once. Under the layers of a route (body, dependencies, routing) each
weighed 36 KB; a route that has returned keeps nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response
from typing_extensions import override

from cotrain_server.errors import CLIENT_CLOSED_REQUEST, RequestError, refusal
from cotrain_server.http.disconnect import while_connected
from cotrain_server.http.tenant_routes import HOLD_S, not_served
from cotrain_store.errors import StoreError, StoreUnavailable
from cotrain_store.redis_client.connection import CONNECTION_LOST

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from starlette.types import Receive, Scope, Send

    Wait = Callable[[], Coroutine[Any, Any, Response]]

_KEY = "held"


class Held(Response):
    """Stands for the answer of a poll until `answer_held` has it. `wait` is called once, or never."""

    def __init__(self, wait: Wait) -> None:
        super().__init__()
        self._wait = wait

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leave it to the edge."""
        scope["state"][_KEY] = self._wait


async def answer_held(scope: Scope, receive: Receive, send: Send) -> None:
    """Wait for what a route left to wait for, if it did, and send it; nothing to whoever hung up."""
    wait: Wait | None = scope["state"].pop(_KEY, None)
    if wait is None:
        return
    answer = await while_connected(receive, _answer(wait, scope["state"]["request_id"]))
    await (answer or Response(status_code=CLIENT_CLOSED_REQUEST))(scope, receive, send)


async def _answer(wait: Wait, request_id: str) -> Response:
    try:
        return await wait()
    except (StoreUnavailable, *CONNECTION_LOST):
        await asyncio.sleep(HOLD_S)
        return not_served()
    except (RequestError, StoreError) as error:
        return refusal(error, request_id)
