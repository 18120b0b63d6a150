"""Kill of the webhook sender during a delivery: another process delivers the unrecorded events."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cotrain_store.keys import tenant_keys
from cotrain_store.redis_client.connection import SyncConnection, open_connection
from cotrain_store.tenants.webhooks import Webhooks
from tests.support.processes import Process
from tests.support.receiver import receiving
from tests.support.redis_server import EmbeddedRedis
from tests.support.waiting import until


async def test_a_killed_process_loses_no_event(
    empty_redis: EmbeddedRedis, redis: SyncConnection, tmp_path: Path
) -> None:
    settings = {
        "COTRAIN_REDIS_URL": empty_redis.url, "COTRAIN_DATA_DIR": str(tmp_path),
        "COTRAIN_PORT": "0", "COTRAIN_WEBHOOK_NETWORKS": "127.0.0.1",
        "COTRAIN_API_KEYS": "tml-alice_secret-of-alice",
    }  # fmt: skip
    connection = open_connection(empty_redis.url)
    webhooks = Webhooks(connection, "none of them")
    async with receiving() as receiver:
        receiver.answers = [b""]  # the first request is never answered
        await webhooks.set(A, f"http://127.0.0.1:{receiver.port}/")
        event = await webhooks.test(A)
        with Process("cotrain_server", settings, tmp_path / "first.log") as first:
            await receiver.until(1)
            await asyncio.to_thread(first.kill)
            redis.delete(tenant_keys.lease())  # otherwise it expires after ten seconds
            with Process("cotrain_server", settings, tmp_path / "second.log"):
                await receiver.until(2)
                await until(lambda: redis.hget(tenant_keys.webhook(A), "delivered") == b"1")
        assert [request.headers["webhook-id"] for request in receiver.requests] == [event] * 2
        assert redis.hlen(tenant_keys.events(A)) == 0
    await connection.aclose()
