"""Work only as long as the client is connected."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from cotrain_store.redis_client.connection import stop_tasks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Receive

Answer = TypeVar("Answer")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer | None:
    """Await `work` as long as its client does; cancel it and give None when that has gone."""
    working: asyncio.Task[Any] = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_end_with_client(receive, working))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        if _is_cancelled():
            raise
        return None
    finally:
        watching.cancel()
        if not working.done():
            await stop_tasks([working])


async def _end_with_client(receive: Receive, working: asyncio.Task[Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await stop_tasks([working])


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
