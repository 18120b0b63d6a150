"""Work only as long as somebody waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from cotrain_store.connection import stop_tasks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request

Answer = TypeVar("Answer")


async def while_connected(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Await `work` as long as its client does; cancel it and give None when that has gone."""
    working: asyncio.Task[Any] = asyncio.ensure_future(work)
    hung_up: asyncio.Task[Any] = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({working, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await stop_tasks([working, hung_up])


async def _hung_up(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
