"""Connections that wait for replicas to fsync each write (`WAITAOF`, Redis 7.2, Valkey).

A write that Redis has acknowledged is on its own disk only, and is lost with its host. After each write that a promise
depends on, these connections wait for replicas to fsync it. If too few do, the write is not rolled back. Its caller
gets a transient refusal, as with a full disk, and repeats the write, which is idempotent.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio
from typing_extensions import override

from cotrain_store.redis_client.batching import BatchingRedis, Command
from cotrain_store.redis_client.refusals import RedisRefuses

#: Timeout of each of the two waits of Redis for its replicas; less than the socket's timeout.
WAIT_MS = 4_000
#: Commands followed by a wait. `SET` is not among them: it writes heartbeats and similar keys,
#: which the next write replaces.
AWAITED = frozenset({
    "EVALSHA", "EVAL", "HSET", "HDEL", "HINCRBY", "DEL", "INCRBY", "SADD", "SREM",
})  # fmt: skip


class ReplicatedRedis(redis.asyncio.Redis):
    """Connection of the scheduler."""

    replicas: int

    @override
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command and return its answer; raises RedisRefuses if a write is on too few disks."""
        if args[0] not in AWAITED:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]  # as redis-py leaves it
        async with self.pipeline(transaction=False) as pipeline:
            pipeline.execute_command(*args, **options)
            for wait in waits_for(self.replicas):
                pipeline.execute_command(*wait)
            return acknowledged(await pipeline.execute(raise_on_error=False), self.replicas)


class ReplicatedSyncRedis(redis.Redis):
    """Connection of a worker."""

    replicas: int

    @override
    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command and return its answer; raises RedisRefuses if a write is on too few disks."""
        if args[0] not in AWAITED:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]  # as redis-py leaves it
        pipelines: Any = self.pipeline(transaction=False)
        with pipelines as pipeline:
            pipeline.execute_command(*args, **options)
            for wait in waits_for(self.replicas):
                pipeline.execute_command(*wait)
            return acknowledged(pipeline.execute(raise_on_error=False), self.replicas)


class _Writes(BatchingRedis):
    """Batches of writes; each batch waits once for all its commands."""

    replicas: int

    @override
    async def _answers(self, batch: Sequence[Command]) -> list[Any]:
        waits: list[Command] = [(wait, {}) for wait in waits_for(self.replicas)]
        *answers, _, disks = await super()._answers([*batch, *waits])
        return [acknowledged_of(answer, disks, self.replicas) for answer in answers]


class ReplicatedBatchingRedis(BatchingRedis):
    """Connection of a server. Writes have their own batches: while they wait for a missing replica, reads continue."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Create a connection with the arguments of `redis.asyncio.Redis`."""
        super().__init__(*args, **options)
        self._writes = _Writes(connection_pool=self.connection_pool)

    @property
    def replicas(self) -> int:
        """Number of replicas that must have each write on disk."""
        return self._writes.replicas

    @replicas.setter
    def replicas(self, replicas: int) -> None:
        self._writes.replicas = replicas

    @override
    def execute_command(  # type: ignore[override]  # as in BatchingRedis
        self, *args: Any, **options: Any
    ) -> asyncio.Future[Any]:
        """Send a command with the next batch of its kind. The future may raise RedisRefuses."""
        if args[0] in AWAITED:
            return self._writes.execute_command(*args, **options)
        return super().execute_command(*args, **options)


WAITING = (ReplicatedRedis, ReplicatedSyncRedis, ReplicatedBatchingRedis)


def waits_for(replicas: int) -> tuple[tuple[str | int, ...], ...]:
    """Return the commands that wait until this connection's last write is on the disks of master and replicas.

    The first command waits for receipt. Without it, a replica that gets the fsync request together with the write has
    not flushed it yet, and reports a second later.
    """
    return ("WAIT", replicas, WAIT_MS), ("WAITAOF", 1, replicas, WAIT_MS)


def acknowledged(answers: Sequence[Any], replicas: int) -> Any:
    """Return the answer to a command that the answers of its waits follow; raises the error of `acknowledged_of`."""
    answer, _, disks = answers
    answer = acknowledged_of(answer, disks, replicas)
    if isinstance(answer, Exception):
        raise answer
    return answer


def acknowledged_of(answer: Any, disks: Any, replicas: int) -> Any:
    """Return an answer, or the error of the command or of its wait."""
    if isinstance(answer, Exception):
        return answer
    if isinstance(disks, Exception):
        return type(disks)(*disks.args)  # one exception for each caller that may raise it
    own, others = disks
    if own < 1 or others < replicas:
        return RedisRefuses(
            f"NOREPLICAS a write is on the disk of {others} of {replicas} replicas (replicas= in COTRAIN_REDIS_URL)"
        )
    return answer
