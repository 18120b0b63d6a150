"""Tenants with the highest device use of the last minutes, on a real Redis."""

from __future__ import annotations

import time

from cotrain_store import redis_keys
from cotrain_store.messages.ids import PoolId
from cotrain_store.monitoring.status import TOP_MINUTES, busiest_tenants
from cotrain_store.redis_client.connection import SyncConnection, open_connection
from cotrain_store.usage import minute_of
from tests.support.redis_server import EmbeddedRedis

POOLS = [PoolId("p"), PoolId("q")]


async def test_the_busiest_tenants_of_all_pools_come_first(empty_redis: EmbeddedRedis, redis: SyncConnection) -> None:
    now = time.time()
    for pool, back, counts in (
        ("p", 0, {"cycles": 2, "tokens|t-a": 900, "device_s|t-a": 0.5, "device_s|t-b": 2}),
        ("p", 1, {"device_s|t-a": 1.25}),
        ("q", 1, {"device_s|t-c": 0.25, "device_s|t-a": 1}),
        ("p", TOP_MINUTES, {"device_s|t-d": 60}),
    ):
        minute = redis_keys.minute(PoolId(pool), minute_of(now) - 60 * back)
        redis.hset(minute, mapping=counts)
    connection = open_connection(empty_redis.url)
    try:
        assert await busiest_tenants(connection, POOLS, now, 2) == [("t-a", 2.75), ("t-b", 2.0)]
        assert await busiest_tenants(connection, [], now, 2) == []
    finally:
        await connection.aclose()
