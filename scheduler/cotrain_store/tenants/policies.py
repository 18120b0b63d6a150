"""What the operator granted single tenants: limits other than the default, and a weight in fair queueing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from cotrain_store.keys import tenant_keys
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.pauses import WEIGHT
from cotrain_store.redis_client.scripts import async_script

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.redis_client.connection import Connection

_Limits = TypeVar("_Limits")
LimitsOf: TypeAlias = Callable[[TenantId], Awaitable[_Limits]]
"""Says what a tenant may have now."""


class Policies:
    """Read and write them; who sets one has checked it."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._tenant_limits = async_script(connection, "tenant_limits")

    async def limits(self, tenant: TenantId) -> dict[str, int]:
        """Read a tenant's own limits by the names of quotas."""
        row = await self._redis.hgetall(tenant_keys.limits(tenant))
        return {name.decode(): int(number) for name, number in row.items()}

    async def set_limits(self, tenant: TenantId, given: Mapping[str, int | None]) -> None:
        """Set what is given, at once; None takes a limit back to its default."""
        numbers = {quota: str(number) for quota, number in given.items() if number is not None}
        back = sorted(given.keys() - numbers.keys())
        await self._tenant_limits([tenant_keys.limits(tenant)], {"numbers": numbers, "back": back})

    async def weight(self, tenant: TenantId) -> float:
        """Read a tenant's weight."""
        return float(await self._redis.hget(tenant_keys.weights(), tenant) or WEIGHT)

    async def set_weight(self, tenant: TenantId, weight: float) -> None:
        """Set a tenant's weight, the default one by forgetting it."""
        if weight == WEIGHT:
            await self._redis.hdel(tenant_keys.weights(), tenant)
        else:
            await self._redis.hset(tenant_keys.weights(), tenant, repr(weight))


async def read_weights(connection: Connection) -> dict[TenantId, float]:
    """Read the weights of all tenants that have another one than the default."""
    rows = await connection.hgetall(tenant_keys.weights())
    return {TenantId(tenant.decode()): float(weight) for tenant, weight in rows.items()}
