"""Connections that take a write for done once it is on the disk of replicas, too (`WAITAOF`, Redis 7.2, Valkey).

A Redis that answers has the write on its own disk, which dies with its host. These ask it, behind each write that
anything is promised on, how many replicas have it on theirs. Where too few do, the write is not taken back: its caller
hears that Redis refuses for now, as with a full disk, and repeats it, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio
from typing_extensions import override

from cotrain_store.redis_client.batching import BatchingRedis, Command
from cotrain_store.redis_client.refusals import RedisRefuses

#: How long Redis waits for its replicas, twice; less than the socket's timeout.
WAIT_MS = 4_000
#: Commands behind which it waits. Not `SET`: heartbeats and the like, which the next one replaces.
AWAITED = frozenset({
    "EVALSHA", "EVAL", "HSET", "HDEL", "HINCRBY", "DEL", "INCRBY", "SADD", "SREM",
})  # fmt: skip


class ReplicatedRedis(redis.asyncio.Redis):
    """Of the scheduler."""

    replicas: int

    @override
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command and return its answer; raises RedisRefuses where a write is on too few disks."""
        if args[0] not in AWAITED:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]  # as redis-py leaves it
        async with self.pipeline(transaction=False) as pipeline:
            pipeline.execute_command(*args, **options)
            for wait in waits_for(self.replicas):
                pipeline.execute_command(*wait)
            return acknowledged(await pipeline.execute(raise_on_error=False), self.replicas)


class ReplicatedSyncRedis(redis.Redis):
    """Of a worker."""

    replicas: int

    @override
    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command and return its answer; raises RedisRefuses where a write is on too few disks."""
        if args[0] not in AWAITED:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]  # as redis-py leaves it
        pipelines: Any = self.pipeline(transaction=False)
        with pipelines as pipeline:
            pipeline.execute_command(*args, **options)
            for wait in waits_for(self.replicas):
                pipeline.execute_command(*wait)
            return acknowledged(pipeline.execute(raise_on_error=False), self.replicas)


class _Writes(BatchingRedis):
    """Batches of writes; each waits once, for all that is in it."""

    replicas: int

    @override
    async def _answers(self, batch: Sequence[Command]) -> list[Any]:
        waits: list[Command] = [(wait, {}) for wait in waits_for(self.replicas)]
        *answers, _, disks = await super()._answers([*batch, *waits])
        return [acknowledged_of(answer, disks, self.replicas) for answer in answers]


class ReplicatedBatchingRedis(BatchingRedis):
    """Of a server. Writes have batches of their own: while they wait for a replica that is away, reads go on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `redis.asyncio.Redis`."""
        super().__init__(*args, **options)
        self._writes = _Writes(connection_pool=self.connection_pool)

    @property
    def replicas(self) -> int:
        """How many replicas have to have a write on their disks."""
        return self._writes.replicas

    @replicas.setter
    def replicas(self, replicas: int) -> None:
        self._writes.replicas = replicas

    @override
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command with the next batch of its kind; raises what Redis says, or RedisRefuses."""
        if args[0] in AWAITED:
            return await self._writes.execute_command(*args, **options)
        return await super().execute_command(*args, **options)


WAITING = (ReplicatedRedis, ReplicatedSyncRedis, ReplicatedBatchingRedis)


def waits_for(replicas: int) -> tuple[tuple[str | int, ...], ...]:
    """Ask to wait until the last write of this connection is on the master's disk and on those of replicas.

    First until they have it: a replica that is asked for its disk together with the write has not flushed it yet,
    and reports a second later.
    """
    return ("WAIT", replicas, WAIT_MS), ("WAITAOF", 1, replicas, WAIT_MS)


def acknowledged(answers: Sequence[Any], replicas: int) -> Any:
    """Return the answer to a command, before those of the waits behind it; raises what `acknowledged_of` gives."""
    answer, _, disks = answers
    answer = acknowledged_of(answer, disks, replicas)
    if isinstance(answer, Exception):
        raise answer
    return answer


def acknowledged_of(answer: Any, disks: Any, replicas: int) -> Any:
    """Return an answer, its error, or the error of the wait behind it, whichever says why it counts for nothing."""
    if isinstance(answer, Exception):
        return answer
    if isinstance(disks, Exception):
        return type(disks)(*disks.args)  # one each: several callers may raise it
    own, others = disks
    if own < 1 or others < replicas:
        return RedisRefuses(
            f"NOREPLICAS a write is on the disk of {others} of {replicas} replicas (replicas= in COTRAIN_REDIS_URL)"
        )
    return answer
