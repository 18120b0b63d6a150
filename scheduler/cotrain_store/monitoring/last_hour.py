"""What pools did minute by minute, for charts. Reads only, as many keys as there are minutes."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.keys import fleet_keys
from cotrain_store.keys.minute_fields import FIELDS, minute_of, tenant_seconds, tenant_tokens
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.scripts import async_script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.messages.ids import PoolId
    from cotrain_store.redis_client.connection import Connection

MINUTES = 60
#: Whose share of the device is added up over so many minutes.
TOP_MINUTES = 15
#: Of 1,000 tenants each costs Redis 1.6 ms.
MINUTES_AT_ONCE = 3


@dataclass(frozen=True)
class Minute:
    """What happened in one minute; the last one is not over."""

    start_s: int
    counts: Mapping[str, float]
    """By `minute_fields.FIELDS`; with a tenant asked for, `own_tokens` and `own_device_s` as well."""

    def of(self, name: str) -> float:
        """Give a count; 0 where nothing was counted."""
        return self.counts.get(name, 0.0)


async def last_minutes(
    connection: Connection, pool: PoolId, now_s: float, tenant: TenantId | None = None
) -> list[Minute]:
    """Read the last hour of a pool, oldest minute first, the current one last."""
    starts = _starts(now_s, MINUTES)
    names = list(FIELDS)
    stored = list(FIELDS)
    if tenant is not None:
        names += ["own_tokens", "own_device_s"]
        stored += [tenant_tokens(tenant), tenant_seconds(tenant)]
    pipeline = connection.pipeline(transaction=False)
    for start in starts:
        pipeline.hmget(fleet_keys.minute(pool, start), stored)
    rows = await pipeline.execute()
    return [
        Minute(start, {name: float(value) for name, value in zip(names, row, strict=True) if value})
        for start, row in zip(starts, rows, strict=True)
    ]


async def busiest_tenants(
    connection: Connection, pools: Sequence[PoolId], now_s: float, most: int
) -> list[tuple[TenantId, float]]:
    """Name those that used the most seconds of the devices in the last minutes, the first one first.

    Redis is asked for a few minutes at a time: then others have their turn.
    """
    busy_minute = async_script(connection, "busy_minute")
    seconds: defaultdict[TenantId, float] = defaultdict(float)
    for pool in pools:
        starts = _starts(now_s, TOP_MINUTES)
        for first in range(0, TOP_MINUTES, MINUTES_AT_ONCE):
            part = starts[first : first + MINUTES_AT_ONCE]
            rows = (busy_minute([fleet_keys.minute(pool, start)], {}) for start in part)
            for row in await asyncio.gather(*rows):
                for tenant, value in json.loads(row).items():
                    seconds[TenantId(tenant)] += float(value)
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))[:most]


def _starts(now_s: float, minutes: int) -> list[int]:
    newest = minute_of(now_s)
    return [newest - 60 * back for back in range(minutes - 1, -1, -1)]
