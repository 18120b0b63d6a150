"""Waiting for results: one subscriber per process wakes every waiter in it.

A message can be lost while the subscription is down. Therefore a waiter registers first and reads
second, every (re)subscription checks all waiters, and so does a slow sweep.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable

from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool
from cotrain_store.disk.stored_results import is_spooled, whole_result
from cotrain_store.errors import RequestNotFound, RunNotFound, SampleExpired, SamplerNotFound, SpoolCorrupt
from cotrain_store.messages.ids import RequestId, SampleName, TenantId, parse_sample, run_of
from cotrain_store.messages.ops import QueuedOp, Result
from cotrain_store.redis_client.connection import CONNECTION_LOST, RETRY_S, ChannelSubscriber, Connection, repeat
from cotrain_store.results.delivery_log import FLUSH_EVERY_S, THIS_SERVER, DeliveryLog
from cotrain_store.results.pending import Pending, PendingReasons
from cotrain_store.tenants.records import Records

SWEEP_S = 5.0


class Futures(ChannelSubscriber):
    """Resolves request ids to results for the tenants that own them."""

    def __init__(self, connection: Connection, spool: Spool, gap_limit_s: float = 900.0) -> None:
        self._redis = connection
        self._spool = spool
        self._records = Records(connection)
        self._deliveries = DeliveryLog(connection)
        self.reasons = PendingReasons(connection, self._records, gap_limit_s)
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
            run, value = await self._records.run_with(
                tenant, run_of(request), lambda: self._redis.get(redis_keys.result(request))
            )
            pool = run.pool
            del run  # thousands wait here
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
            return await self.reasons.of_op(tenant, pool, request)
        if key_id is not None:
            self._deliveries.sent(tenant, request, pool, time.monotonic(), key_id)
        return await self._whole(value, RequestNotFound("The result has expired."))

    async def _sample_outcome(
        self, tenant: TenantId, request: RequestId, name: SampleName, timeout_s: float, key_id: str | None
    ) -> Result | Pending:
        is_done = await self._is_sample_done(tenant, request, name)
        value = await self._awaited(request, 0.0 if is_done else timeout_s)
        if value is None and not await self._is_sample_done(tenant, request, name):
            return Pending() if self._released else await self.reasons.of_sample(tenant, request, name)
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
