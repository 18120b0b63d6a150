"""Connection that batches the commands of concurrent callers.

While one batch is in flight, the next one gathers. Under load a request then costs a share of a
round trip, and of an fsync: with `appendfsync always`, Redis syncs once for all commands that
arrived together. A single request costs the same as without batching.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import redis.asyncio
from redis.exceptions import RedisError
from typing_extensions import override

#: Maximum number of commands in one batch, which blocks Redis for a few milliseconds.
LIMITS = 256

#: A command, and the redis-py options for its answer.
Command: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
_Asked: TypeAlias = "tuple[Command, asyncio.Future[Any]]"


class BatchingRedis(redis.asyncio.Redis):
    """Connection for processes with many concurrent callers. Commands of different callers keep no order."""

    _asked: list[_Asked]
    _sending: asyncio.Task[None] | None = None

    @override
    def execute_command(  # type: ignore[override]  # awaited in the same way
        self, *args: Any, **options: Any
    ) -> asyncio.Future[Any]:
        """Send a command with the next batch, and return the future of its answer, or of the error of Redis.

        Commands of one caller share a batch if it awaits none before it has sent all.
        """
        answer = asyncio.get_running_loop().create_future()
        encode = self.get_encoder().encode  # type: ignore[no-untyped-call]  # redis-py gives it no types
        try:  # here, so that a command that cannot be encoded fails alone
            args = (args[0], *map(encode, args[1:]))
        except (RedisError, ValueError) as error:
            answer.set_exception(error)
            return answer
        if self._sending is None:
            self._asked = []
            self._sending = asyncio.create_task(self._send())
        self._asked.append(((args, options), answer))
        return answer

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
                # One exception for each caller, because an exception keeps the stack of each caller that raised it.
                return [type(lost)(*lost.args) for _ in batch]
            return answers


def _give(answer: asyncio.Future[Any], value: Any) -> None:
    if answer.done():  # its caller has given up
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
    else:
        answer.set_result(value)
