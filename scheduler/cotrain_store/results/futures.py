"""Waiting for results: one subscriber per process wakes every waiter in it.

A message can be lost while the subscription is down. Therefore a waiter registers first and reads
second, every (re)subscription checks all waiters, and so does a slow sweep.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool
from cotrain_store.disk.storage import is_spooled, whole_result
from cotrain_store.errors import RequestNotFound, RunNotFound, SampleExpired, SamplerNotFound, SpoolCorrupt
from cotrain_store.messages.ids import (
    PoolId,
    RequestId,
    RunId,
    SampleName,
    TenantId,
    WeightsRef,
    WorkerId,
    parse_sample,
    run_of,
)
from cotrain_store.messages.ops import QueuedOp, Result
from cotrain_store.redis_client.connection import (
    CONNECTION_LOST,
    RETRY_S,
    ChannelSubscriber,
    Connection,
    clock_ms,
    repeat,
    replies,
)
from cotrain_store.results.delivery import FLUSH_EVERY_S, THIS_SERVER, DeliveryLog
from cotrain_store.results.queue_notice import (
    Backlogs,
    client_seq,
    not_yet_here,
    sample_notice,
    still_waiting,
    training_notice,
)
from cotrain_store.tenants.records import Records

SWEEP_S = 5.0
#: Below this age, a gap means that its client is still sending.
GAP_NOTICE_S = 120.0
#: Maximum number of digits of a seq; longer ones are invalid.
_SEQ_DIGITS = 19

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@dataclass(frozen=True)
class Pending:
    """A missing result, with the reason if there is one to show."""

    queue_state: QueueState = "active"
    reason: str | None = None


NO_WORKER = Pending("paused_capacity", "no worker serves this base model at the moment")


class Futures(ChannelSubscriber):
    """Resolves request ids to results for the tenants that own them."""

    def __init__(self, connection: Connection, spool: Spool, gap_limit_s: float = 900.0) -> None:
        self._gap_limit_s = gap_limit_s
        self._redis = connection
        self._spool = spool
        self._records = Records(connection)
        self._deliveries = DeliveryLog(connection)
        self._backlogs = Backlogs(connection)
        super().__init__(
            connection, redis_keys.notify_results(), self._receive,
            lambda: repeat("sweep futures", SWEEP_S, self._sweep),
            lambda: repeat("flush deliveries", FLUSH_EVERY_S, self._deliveries.flush),
        )  # fmt: skip
        self._waiters: defaultdict[str, set[asyncio.Future[bytes | None]]] = defaultdict(set)
        self._released = False

    @override
    async def __aexit__(self, *_: object) -> None:
        """Stop listening; requests still waiting get Pending."""
        self.release_all()
        await super().__aexit__()
        await self._deliveries.flush()

    @property
    def waiters(self) -> int:
        """Number of requests held open in this process."""
        return sum(len(waiting) for waiting in self._waiters.values())

    def release_all(self) -> None:
        """Return Pending to every waiter, now and from now on: this process is draining."""
        self._released = True
        for waiting in self._waiters.values():
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(
        self, tenant: TenantId, request: RequestId, timeout_s: float, key_id: str | None = THIS_SERVER
    ) -> Result | Pending:
        """Wait for the result, at most `timeout_s`.

        The result counts as sent to the client of the API key `key_id`. With None the call changes
        nothing. An unavailable Redis or disk is a pause for the client: the call returns Pending
        and raises no error. Raises RequestNotFound: unknown, expired, or another tenant's.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return await self._outcome(tenant, request, left_s, key_id)
            except (*CONNECTION_LOST, OSError):  # OSError: a file that cannot be read now
                if self._released or left_s == 0.0:
                    return Pending("paused_capacity", "the server's store is restarting")
                await asyncio.sleep(min(RETRY_S, left_s))

    async def trace_of(self, tenant: TenantId, request: RequestId) -> str:
        """Return the span in an op's record; "" if there is none, or the record is deleted."""
        try:
            run = await self._records.run(tenant, run_of(request))
            seq = request.rpartition(":")[2]
            envelope = await self._redis.hget(redis_keys.ops(run.pool, run.id), seq)
        except (RunNotFound, *CONNECTION_LOST):
            return ""
        return QueuedOp.parse(run.id, int(seq), envelope.decode()).trace if envelope else ""

    async def _outcome(
        self, tenant: TenantId, request: RequestId, timeout_s: float, key_id: str | None
    ) -> Result | Pending:
        name = parse_sample(request)
        if name:
            return await self._sample_outcome(tenant, request, name, timeout_s, key_id)
        if not request.isascii():  # as of no request; Redis cannot read half a surrogate pair
            raise RequestNotFound
        waiter = self._register(request)
        try:
            pool = (await self._records.created_run(tenant, run_of(request))).pool
            value = await self._redis.get(redis_keys.result(request))
            if value is None:
                value = await self._until(waiter, timeout_s)
        except RunNotFound as foreign:
            raise RequestNotFound from foreign
        finally:
            self._deregister(request, waiter)
        if value is None and self._released:
            # No look-up: thousands leave at once, and the next process checks anyway.
            return Pending()
        if value is None:
            return await self._pending(tenant, pool, request)
        if key_id is not None:
            self._deliveries.sent(tenant, request, pool, time.monotonic(), key_id)
        return await self._whole(value, RequestNotFound("The result has expired."))

    async def _sample_outcome(
        self, tenant: TenantId, request: RequestId, name: SampleName, timeout_s: float, key_id: str | None
    ) -> Result | Pending:
        is_done = await self._is_sample_done(tenant, request, name)
        value = await self._awaited(request, 0.0 if is_done else timeout_s)
        if value is None and not await self._is_sample_done(tenant, request, name):
            return Pending() if self._released else await self._pending_sample(tenant, request, name)
        # The request may have finished between the two checks.
        value = value or await self._redis.get(redis_keys.result(request))
        if value is None:
            raise SampleExpired
        if key_id is not None:
            self._deliveries.sent(tenant, request, name, time.monotonic(), key_id)
        return await self._whole(value, SampleExpired())

    async def _is_sample_done(self, tenant: TenantId, request: RequestId, name: SampleName) -> bool:
        """Return True if a sample request is done; raises SampleExpired for one that may be requested again."""
        owner, state = await self._redis.hmget(redis_keys.sample(request), ["tenant", "state"])
        if owner is None:
            with contextlib.suppress(SamplerNotFound):
                await self._records.sampler(tenant, name.sampler)
                raise SampleExpired
        if owner is None or owner.decode() != tenant:
            raise RequestNotFound
        return bool(state == b"done")

    def _register(self, request: RequestId) -> asyncio.Future[bytes | None]:
        """Return a future of the result. The caller reads the result next, as it may be stored already.

        No context manager: it would keep a generator for each of thousands.
        """
        waiter: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._waiters[request].add(waiter)
        return waiter

    def _deregister(self, request: RequestId, waiter: asyncio.Future[bytes | None]) -> None:
        self._waiters[request].discard(waiter)
        if not self._waiters[request]:
            del self._waiters[request]

    async def _awaited(self, request: RequestId, timeout_s: float) -> bytes | None:
        waiter = self._register(request)
        try:
            value: bytes | None = await self._redis.get(redis_keys.result(request))
            return await self._until(waiter, timeout_s) if value is None else value
        finally:
            self._deregister(request, waiter)

    async def _until(self, waiter: asyncio.Future[bytes | None], timeout_s: float) -> bytes | None:
        if self._released:
            return None
        # Equivalent to `asyncio.wait_for`, with one future and one frame less for each of thousands.
        timer = asyncio.get_running_loop().call_later(timeout_s, _give_up, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()

    async def _pending_sample(self, tenant: TenantId, request: RequestId, name: SampleName) -> Pending:
        try:
            pool = (await self._records.sampler(tenant, name.sampler)).pool
        except SamplerNotFound:  # its request continues without it
            return Pending()
        backlog = await self._backlogs.of(pool)
        pause = backlog.policy.pauses.notice(tenant)
        if pause:
            return Pending("paused_capacity", pause)
        if not backlog.workers:
            return NO_WORKER
        before = await self._waiting_before(tenant, pool, request)
        return Pending(reason=sample_notice(backlog, tenant, before))

    async def _waiting_before(self, tenant: TenantId, pool: PoolId, request: RequestId) -> int | None:
        """Return the number of the tenant's sample requests waiting before this one; None if it is not waiting."""
        workers = await self._redis.smembers(redis_keys.workers(pool))
        queues = (redis_keys.ANY_WORKER, *(worker.decode() for worker in workers))
        lists = (redis_keys.waiting_samples(pool, queue, tenant) for queue in queues)
        positions = await replies(self._redis, (("LPOS", waiting, request) for waiting in lists))
        return next((position for position in positions if position is not None), None)

    async def _pending(self, tenant: TenantId, pool: PoolId, request: RequestId) -> Pending:
        """Return the reason why a request waits; raises RequestNotFound if it never existed or has expired."""
        run = run_of(request)
        log, since, now_ms = await asyncio.gather(
            self._redis.hmget(redis_keys.log(pool, run), ["next", "done", "last", "worker"]),
            self._redis.zscore(redis_keys.gaps(pool), run),
            clock_ms(self._redis),
        )
        seq = request.rpartition(":")[2]
        is_seq = seq.isdecimal() and len(seq) <= _SEQ_DIGITS
        if log[0] is None or not is_seq or int(seq) > int(log[2]):
            raise RequestNotFound
        if int(seq) <= int(log[1]) and await self._has_expired(request):
            raise RequestNotFound("The result has expired.")
        if since is not None and int(seq) >= int(log[0]):
            missing = await client_seq(self._redis, pool, run, int(log[0]))
            return self._gap_pending(missing, (now_ms - since) / 1000)
        position = int(seq) - int(log[1])
        if position <= 0:
            return Pending()  # done: its weights are being written to disk
        backlog = await self._backlogs.of(pool)
        pause = backlog.policy.pauses.notice(tenant, run)
        if pause and int(seq) >= int(log[0]):  # not planned yet
            return Pending("paused_capacity", pause)
        if not backlog.workers:
            return NO_WORKER
        worker = WorkerId(log[3].decode()) if log[3] else None
        return Pending(reason=training_notice(backlog, tenant, position, worker))

    async def gap_notice(self, pool: PoolId, run: RunId) -> str | None:
        """Return a notice with the missing seq of a run and its deadline, or None if none is missing."""
        since, first, now_ms = await asyncio.gather(
            self._redis.zscore(redis_keys.gaps(pool), run),
            self._redis.hget(redis_keys.log(pool, run), "next"),
            clock_ms(self._redis),
        )
        if since is None or first is None:
            return None
        missing = await client_seq(self._redis, pool, run, int(first))
        return self._gap_pending(missing, (now_ms - since) / 1000).reason

    def _gap_pending(self, missing: int, age_s: float) -> Pending:
        left_s = max(0.0, self._gap_limit_s - age_s)
        if age_s > GAP_NOTICE_S:
            return Pending("paused_capacity", still_waiting(missing, left_s))
        return Pending(reason=not_yet_here(missing, left_s))

    async def _has_expired(self, request: RequestId) -> bool:
        """Return True if the result of a committed op has expired; a save with unstored weights has none yet."""
        # The order matters: weights that are unstored at the first check may have their result at the second.
        if await self._redis.hexists(redis_keys.weights(WeightsRef(request)), "checkpoint"):
            return False
        return await self._redis.get(redis_keys.result(request)) is None

    async def _whole(self, value: bytes, expired: RequestNotFound) -> Result:
        """Return a result with its payload; raises `expired` if that is missing."""
        result = Result.decode(value)
        try:
            return await asyncio.to_thread(whole_result, result, self._spool) if is_spooled(result) else result
        except SpoolCorrupt as missing:
            raise expired from missing

    async def _receive(self, message: bytes | None) -> None:
        """Resolve the requests in the message, or all after a (re)subscription."""
        named = list(self._waiters) if message is None else message.decode().split("\n")
        await self._resolve(named)

    async def _sweep(self) -> None:
        await self._resolve(list(self._waiters))
        await self._deliveries.expire_read(time.monotonic())

    async def _resolve(self, requests: Iterable[str]) -> None:
        waiting = [request for request in requests if request in self._waiters]
        if not waiting:
            return
        values = await self._redis.mget([redis_keys.result(RequestId(r)) for r in waiting])
        for request, value in zip(waiting, values, strict=True):
            if value is None:
                continue
            for waiter in self._waiters.get(request, ()):
                if not waiter.done():
                    waiter.set_result(value)


def _give_up(waiter: asyncio.Future[bytes | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
