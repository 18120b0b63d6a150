"""What people call tenants, in addition to the ids that records hold: for operators, in status and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.keys import tenant_keys
from cotrain_store.redis_client.connection import CONNECTION_LOST

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from cotrain_store.messages.ids import TenantId
    from cotrain_store.redis_client.connection import Connection, SyncConnection


async def name_tenant(connection: Connection, tenant: TenantId, name: str) -> None:
    """Name a tenant after its first key; a second name changes nothing."""
    await connection.hsetnx(tenant_keys.tenant_names(), tenant, name)


async def tenant_names(
    connection: Connection, tenants: Collection[TenantId]
) -> dict[TenantId, str]:
    """Look up names; a tenant that never had a key is left out."""
    ids = sorted(tenants)
    return _named(ids, await connection.hmget(tenant_keys.tenant_names(), ids)) if ids else {}


class TenantNames:
    """Names for a process that writes a line per cycle: each is asked for once."""

    def __init__(self, connection: SyncConnection) -> None:
        self._redis = connection
        self._known: dict[TenantId, str] = {}

    def of(self, tenants: Collection[TenantId]) -> dict[TenantId, str]:
        """Look up names; of those unknown now (or while Redis is away) there is none."""
        unknown = sorted(set(tenants) - self._known.keys())
        if unknown:
            try:
                found = self._redis.hmget(tenant_keys.tenant_names(), unknown)
            except CONNECTION_LOST:
                found = [None] * len(unknown)
            self._known.update(_named(unknown, found))
        return {tenant: self._known[tenant] for tenant in tenants if tenant in self._known}


def _named(tenants: Sequence[TenantId], names: Sequence[bytes | None]) -> dict[TenantId, str]:
    found = zip(tenants, names, strict=True)
    return {tenant: name.decode() for tenant, name in found if name is not None}
