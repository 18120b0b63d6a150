"""Reasons for which a result is still missing, as the polls of waiting clients show them."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from cotrain_store import redis_keys
from cotrain_store.errors import RequestNotFound, SamplerNotFound
from cotrain_store.messages.ids import PoolId, RequestId, RunId, SampleName, TenantId, WeightsRef, WorkerId, run_of
from cotrain_store.redis_client.connection import Connection, clock_ms, replies
from cotrain_store.results.queue_notice import (
    Backlogs,
    client_seq,
    not_yet_here,
    sample_notice,
    still_waiting,
    training_notice,
)
from cotrain_store.tenants.records import Records

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


class PendingReasons:
    """Reader of the reason why a request has no result yet."""

    def __init__(self, connection: Connection, records: Records, gap_limit_s: float) -> None:
        self._redis = connection
        self._records = records
        self._gap_limit_s = gap_limit_s
        self._backlogs = Backlogs(connection)

    async def of_op(self, tenant: TenantId, pool: PoolId, request: RequestId) -> Pending:
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

    async def of_sample(self, tenant: TenantId, request: RequestId, name: SampleName) -> Pending:
        """Return the reason why a sample request waits."""
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

    async def _waiting_before(self, tenant: TenantId, pool: PoolId, request: RequestId) -> int | None:
        """Return the number of the tenant's sample requests waiting before this one; None if it is not waiting."""
        workers = await self._redis.smembers(redis_keys.workers(pool))
        queues = (redis_keys.ANY_WORKER, *(worker.decode() for worker in workers))
        lists = (redis_keys.waiting_samples(pool, queue, tenant) for queue in queues)
        positions = await replies(self._redis, (("LPOS", waiting, request) for waiting in lists))
        return next((position for position in positions if position is not None), None)

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
