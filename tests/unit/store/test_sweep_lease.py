"""Who may sweep: one worker, the same for as long as it asks, and another one soon after it is gone."""

from __future__ import annotations

from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_store.weights.saved_weights import LEASE_MS, SweepLease
from tests.support.redis_server import EmbeddedRedis


def test_one_sweeps_and_another_one_when_it_is_gone(empty_redis: EmbeddedRedis) -> None:
    with open_sync_connection(empty_redis.url) as redis:
        one, other = (SweepLease(redis, "sweeper", name) for name in ("w0", "w1"))
        assert one.is_mine(0.0)
        assert not other.is_mine(0.0)
        redis.pexpire("sweeper", LEASE_MS // 10)
        assert one.is_mine(30.0)
        assert redis.pttl("sweeper") > LEASE_MS // 2  # it keeps what it has
        assert SweepLease(redis, "sweeper", "w0").is_mine(0.0)  # the next process of that worker
        redis.delete("sweeper")
        assert other.is_mine(30.0)
        assert one.is_mine(31.0)  # it asks now and then
        assert not one.is_mine(60.0)
