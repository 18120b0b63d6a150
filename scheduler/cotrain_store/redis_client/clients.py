"""Clients of Redis that batch the commands of concurrent callers, or wait until replicas have each write on disk."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import redis
import redis.asyncio
from redis.connection import DefaultParser
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from typing_extensions import override


class RedisRefuses(ResponseError):
    """Redis refuses writes, or all commands, until its operator or time resolves the cause."""


#: Codes without an error type in redis-py: a script that runs too long, a failing disk, too few replicas, no master.
_UNNAMED = ("BUSY", "UNKILLABLE", "MISCONF", "NOREPLICAS")
#: Errors that require an operator: each one is logged.
NEEDS_OPERATOR = (RedisRefuses, ReadOnlyError)
#: Transient errors. redis-py treats LOADING as a lost connection.
REFUSALS = (*NEEDS_OPERATOR, OutOfMemoryError)
_TYPES: dict[str, type[ResponseError]] = {
    **dict.fromkeys(_UNNAMED, RedisRefuses),
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
}
_IN_SCRIPT = re.compile(rf" -({'|'.join(_TYPES)}) ")


def name_refusals() -> None:
    """Register RedisRefuses in redis-py for the codes without a type. Idempotent."""
    DefaultParser.EXCEPTION_CLASSES.update(dict.fromkeys(_UNNAMED, RedisRefuses))


def named(refused: ResponseError) -> ResponseError:
    """Return the error of a script as the exception type of its reply code, if it is transient.

    In Redis 6.2 every error within a script is an `ERR` with the code in its text.
    """
    code = _IN_SCRIPT.search(str(refused))
    return _TYPES[code[1]](str(refused)) if code else refused


#: Maximum number of commands in one batch, which blocks Redis for a few milliseconds.
COMMANDS_AT_ONCE = 256
#: A command, and the redis-py options for its answer.
Command: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
_Queued: TypeAlias = "tuple[Command, asyncio.Future[Any]]"


class BatchingRedis(redis.asyncio.Redis):
    """Connection for processes with many concurrent callers. Commands of different callers keep no order.

    While one batch is in flight, the next one gathers. Under load a request then costs a share of a round trip, and of
    an fsync: with `appendfsync always`, Redis syncs once for all commands that arrived together. A single request
    costs the same as without batching.
    """

    _queued: list[_Queued]
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
            self._queued = []
            self._sending = asyncio.create_task(self._send())
        self._queued.append(((args, options), answer))
        return answer

    async def _send(self) -> None:
        batch: list[_Queued] = []
        try:
            while self._queued:
                batch, self._queued = self._queued[:COMMANDS_AT_ONCE], self._queued[COMMANDS_AT_ONCE:]
                answers = await self._answers([command for command, _ in batch])
                for (_, answer), value in zip(batch, answers, strict=True):
                    _give(answer, value)
        finally:
            self._sending = None
            # This process ends: no caller may wait permanently.
            for _, answer in [*batch, *self._queued]:
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


#: Timeout of each of the two waits of Redis for its replicas; less than the socket's timeout.
WAIT_MS = 4_000
#: Commands followed by a wait. `SET` is not among them: it writes heartbeats and similar keys,
#: which the next write replaces.
AWAITED = frozenset({"EVALSHA", "EVAL", "HSET", "HDEL", "HINCRBY", "DEL", "INCRBY", "SADD", "SREM"})


class ReplicatedRedis(redis.asyncio.Redis):
    """Connection of the scheduler that waits until replicas have each write on disk.

    A write that only Redis has acknowledged is lost with its host. If too few replicas fsync a write, it is not rolled
    back. Its caller gets a transient refusal, as with a full disk, and repeats the write, which is idempotent.
    """

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
