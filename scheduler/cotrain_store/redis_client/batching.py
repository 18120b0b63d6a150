"""A connection whose callers share their way to Redis: what is asked for while a batch is on its way
goes with the next one.

While one batch is on its way the next one gathers. Under load a request then costs a share of a round
trip, and of an fsync (with `appendfsync always` Redis syncs once for all that came in together); alone
it costs what it would have anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import redis.asyncio
from redis.exceptions import RedisError
from typing_extensions import override

#: Commands in one batch, at most: Redis is held by one for a few milliseconds.
LIMITS = 256

#: A command, and what redis-py is to know of its answer.
Command: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
_Asked: TypeAlias = "tuple[Command, asyncio.Future[Any]]"


class BatchingRedis(redis.asyncio.Redis):
    """For processes with many callers at once. Commands of different callers keep no order."""

    _asked: list[_Asked]
    _sending: asyncio.Task[None] | None = None

    @override
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command with the next batch and return its answer; raises what Redis says to it."""
        # Here, so that what cannot be sent fails alone.
        encode = self.get_encoder().encode  # type: ignore[no-untyped-call]  # redis-py gives it no types
        args = (args[0], *map(encode, args[1:]))
        answer = asyncio.get_running_loop().create_future()
        if self._sending is None:
            self._asked = []
            self._sending = asyncio.create_task(self._send())
        self._asked.append(((args, options), answer))
        return await answer

    async def _send(self) -> None:
        batch: list[_Asked] = []
        try:
            while self._asked:
                batch, self._asked = self._asked[:LIMITS], self._asked[LIMITS:]
                answers = await self._answers([command for command, _ in batch])
                for (_, answer), value in zip(batch, answers, strict=True):
                    _give(answer, value)
        finally:
            self._sending = None
            # This process ends: no caller may wait permanently.
            for _, answer in [*batch, *self._asked]:
                answer.cancel()

    async def _answers(self, batch: Sequence[Command]) -> list[Any]:
        async with self.pipeline(transaction=False) as pipeline:
            for args, options in batch:
                pipeline.execute_command(*args, **options)
            try:
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
            except RedisError as lost:
                # One each: an exception keeps the stack of each caller that raised it.
                return [type(lost)(*lost.args) for _ in batch]
            return answers


def _give(answer: asyncio.Future[Any], value: Any) -> None:
    if answer.done():  # its caller has given up
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
    else:
        answer.set_result(value)
