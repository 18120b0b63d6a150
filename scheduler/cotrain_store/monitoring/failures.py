"""Failed and refused requests of tenants. Scripts count failures when they store a result, an API process its refusals."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from cotrain_store import redis_keys
from cotrain_store.errors import Refused
from cotrain_store.messages.ids import PoolId, TenantId
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST, Connection, replies
from cotrain_store.usage import minute_of

#: Window of `recent_failures` in minutes.
MINUTES = 15
#: Interval in s at which a process stores its refusals.
STORED_EVERY_S = 1.0
#: Statuses of refusals: the request is wrong, exceeds a limit, or the server has no room.
_COUNTED = (400, 413, 429, 503)
#: Maximum characters of a stored message.
_CHARACTERS = 300


@dataclass(frozen=True)
class TenantFailures:
    """Failed and refused requests of a tenant in the last MINUTES, and the newest of them."""

    failed: int
    refused: int
    at: float  # Time of the newest one, in s since the epoch
    message: str  # Its error message
    request: str  # Id of a failed request; empty for a refused one
    status: int = 0  # Status of a refused request

    @property
    def count(self) -> int:
        """Return the number of failed and refused requests."""
        return self.failed + self.refused


async def recent_failures(connection: Connection, now_s: float) -> dict[TenantId, TenantFailures]:
    """Return the tenants with failed or refused requests in the last MINUTES, most requests first."""
    newest = minute_of(now_s)
    minutes = (redis_keys.failures(newest - 60 * back) for back in range(MINUTES))
    counts: Counter[str] = Counter()
    for row in await replies(connection, (("HGETALL", minute) for minute in minutes)):
        counts.update({field.decode(): int(count) for field, count in row.items()})
    fields = list(counts)
    found = await connection.hmget(redis_keys.newest_failures(), fields) if fields else []
    texts = {field: json.loads(text) for field, text in zip(fields, found, strict=True) if text}
    tenants = {TenantId(field.partition("|")[2]) for field in fields}
    rows = {tenant: _of(tenant, counts, texts) for tenant in tenants}
    return dict(sorted(rows.items(), key=lambda item: (-item[1].count, item[0])))


def _of(tenant: TenantId, counts: Mapping[str, int], texts: Mapping[str, Mapping[str, object]]) -> TenantFailures:
    fields = (f"failed|{tenant}", f"refused|{tenant}")
    known = [texts[field] for field in fields if field in texts]
    newest = max(known, key=lambda text: float(str(text["at"])), default={})
    return TenantFailures(
        failed=counts.get(fields[0], 0),
        refused=counts.get(fields[1], 0),
        at=float(str(newest.get("at", 0.0))),
        message=str(newest.get("message", ""))[:_CHARACTERS],
        request=str(newest.get("request", "")),
        status=int(str(newest.get("status", 0))),
    )


async def most_failures(connection: Connection, max_tenants: int) -> dict[PoolId, list[tuple[TenantId, int]]]:
    """Return the tenants of each pool with the most failed requests in total, at most `max_tenants`."""
    found: dict[PoolId, list[tuple[TenantId, int]]] = {}
    for field, count in (await connection.hgetall(redis_keys.failure_totals())).items():
        pool, _, tenant = field.decode().rpartition("|")
        found.setdefault(PoolId(pool), []).append((TenantId(tenant), int(count)))
    return {pool: sorted(rows, key=lambda row: (-row[1], row[0]))[:max_tenants] for pool, rows in found.items()}


class Refusals:
    """Refused requests of tenants in one process, stored every STORED_EVERY_S.

    A client that repeats a refused request at once costs Redis one write a second.
    """

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._counts: Counter[TenantId] = Counter()
        self._newest: dict[TenantId, dict[str, object]] = {}
        self._storing: asyncio.Task[None] | None = None

    def record(self, tenant: TenantId, refused: Refused) -> None:
        """Count a refused request of a tenant. A missing resource is no refusal."""
        if refused.reason.status not in _COUNTED:
            return
        metrics.count_refusal(tenant, refused.reason.code)
        self._counts[tenant] += 1
        self._newest[tenant] = {"message": str(refused)[:_CHARACTERS], "status": refused.reason.status}
        if self._storing is None or self._storing.done():
            self._storing = asyncio.create_task(self._store_later())

    async def _store_later(self) -> None:
        while self._counts:
            await asyncio.sleep(STORED_EVERY_S)
            with suppress(*CONNECTION_LOST):  # they are counted later
                await self.store()

    async def store(self) -> None:
        """Store the refusals counted so far. Raises the errors of CONNECTION_LOST."""
        counts, now_s = self._counts.copy(), time.time()
        if not counts:
            return
        minute = redis_keys.failures(minute_of(now_s))
        newest = {f"refused|{tenant}": json.dumps({"at": now_s, **each}) for tenant, each in self._newest.items()}
        pipeline = self._redis.pipeline(transaction=False)
        for tenant, count in counts.items():
            pipeline.hincrby(minute, f"refused|{tenant}", count)
        pipeline.expire(minute, redis_keys.MINUTE_TTL_S)
        pipeline.hset(redis_keys.newest_failures(), mapping=newest)
        pipeline.expire(redis_keys.newest_failures(), redis_keys.MINUTE_TTL_S)
        await pipeline.execute()
        self._counts -= counts
        self._newest = {each: self._newest[each] for each in self._counts}
