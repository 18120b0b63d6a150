"""Limits, fair-queueing weights and pauses that the operator set for tenants and runs.

The scheduler, workers and polls read these records.
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias, TypeVar

from cotrain_store import redis_keys
from cotrain_store.errors import RunClosed
from cotrain_store.messages.fleet import WEIGHT, Pause, Pauses
from cotrain_store.messages.ids import RunId, TenantId, decode, encode
from cotrain_store.messages.runs import RunRecord
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script

_Limits = TypeVar("_Limits")
LimitsOf: TypeAlias = Callable[[TenantId], Awaitable[_Limits]]
"""Function that returns the current limits of a tenant."""


class Policies:
    """Reads and writes limits and weights. The caller of a setter has checked the values."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._tenant_limits = async_script(connection, "tenant_limits")

    async def limits(self, tenant: TenantId) -> dict[str, int]:
        """Return a tenant's own limits by the names of quotas."""
        row = await self._redis.hgetall(redis_keys.limits(tenant))
        return {name.decode(): int(number) for name, number in row.items()}

    async def set_limits(self, tenant: TenantId, given: Mapping[str, int | None]) -> None:
        """Set the given limits atomically; None restores the default."""
        numbers = {quota: str(number) for quota, number in given.items() if number is not None}
        back = sorted(given.keys() - numbers.keys())
        await self._tenant_limits([redis_keys.limits(tenant)], {"numbers": numbers, "back": back})

    async def weight(self, tenant: TenantId) -> float:
        """Return a tenant's weight."""
        return float(await self._redis.hget(redis_keys.tenant_weights(), tenant) or WEIGHT)

    async def set_weight(self, tenant: TenantId, weight: float) -> None:
        """Set a tenant's weight. The default weight deletes the record."""
        if weight == WEIGHT:
            await self._redis.hdel(redis_keys.tenant_weights(), tenant)
        else:
            await self._redis.hset(redis_keys.tenant_weights(), tenant, repr(weight))


async def read_weights(connection: Connection) -> dict[TenantId, float]:
    """Return the weights of all tenants whose weight differs from the default."""
    rows = await connection.hgetall(redis_keys.tenant_weights())
    return {TenantId(tenant.decode()): float(weight) for tenant, weight in rows.items()}


class PauseRecords:
    """Writes pauses. Each survives every restart, and writing it is idempotent."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._pause_run = async_script(connection, "run_pause")

    async def pause_tenant(self, tenant: TenantId, reason: str = "") -> None:
        """Exclude a tenant's ops and sample requests from now on; planned or claimed ones finish as usual."""
        pause = encode(Pause(time.time(), reason))
        await self._redis.hset(redis_keys.paused_tenants(), tenant, pause)

    async def resume_tenant(self, tenant: TenantId) -> bool:
        """Resume a tenant. Return False if it was not paused."""
        return bool(await self._redis.hdel(redis_keys.paused_tenants(), tenant))

    async def pause_run(self, run: RunRecord, reason: str = "") -> None:
        """Exclude the ops of a run from now on; raises RunClosed if it has ended."""
        script_keys = [redis_keys.log(run.pool, run.id), redis_keys.paused_runs()]
        pause = encode(Pause(time.time(), reason, run.tenant))
        if await self._pause_run(script_keys, {"run": run.id, "pause": pause}) == b"CLOSED":
            raise RunClosed

    async def resume_run(self, run: RunRecord) -> bool:
        """Resume a run. Return False if it was not paused."""
        return bool(await self._redis.hdel(redis_keys.paused_runs(), run.id))


async def read_pauses(connection: Connection) -> Pauses:
    """Return the paused tenants and runs."""
    tenants = await connection.hgetall(redis_keys.paused_tenants())
    runs = await connection.hgetall(redis_keys.paused_runs())
    return Pauses(
        {TenantId(name): pause for name, pause in _pauses(tenants).items()},
        {RunId(name): pause for name, pause in _pauses(runs).items()},
    )


def _pauses(rows: Mapping[bytes, bytes]) -> dict[str, Pause]:
    return {name.decode(): decode(Pause, json.loads(row)) for name, row in rows.items()}
