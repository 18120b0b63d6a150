"""Strike idle tenants off a pool's list. Whatever ends work does so at once; an older version never did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.keys import fleet_keys, run_keys
from cotrain_store.redis_client.scripts import sync_script

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId
    from cotrain_store.redis_client.connection import SyncConnection

#: Redis does nothing else while it looks at these.
TENANTS_AT_ONCE = 1_000


def strike_idle_tenants(connection: SyncConnection, pool: PoolId) -> None:
    """Leave on the list only those for which something waits or runs. Twice is harmless."""
    strike, prefix = sync_script(connection, "idle_tenants"), fleet_keys.prefix(pool)
    cursor = None
    while cursor != 0:
        cursor, names = connection.sscan(
            run_keys.queue_tenants(pool), cursor or 0, count=TENANTS_AT_ONCE
        )
        strike([], {"prefix": prefix, "tenants": [name.decode() for name in names]})
