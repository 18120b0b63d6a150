"""Lease of the sweeper: one worker keeps it while it renews it, and another takes it after that worker has left."""

from __future__ import annotations

from cotrain_store.disk.sweep_lease import LEASE_MS, SweepLease
from cotrain_store.redis_client.connection import open_sync_connection
from tests.support.redis_server import EmbeddedRedis


def test_one_worker_sweeps_and_another_after_it_has_left(empty_redis: EmbeddedRedis) -> None:
    with open_sync_connection(empty_redis.url) as redis:
        one, other = (SweepLease(redis, "sweeper", name) for name in ("w0", "w1"))
        assert one.is_mine(0.0)
        assert not other.is_mine(0.0)
        redis.pexpire("sweeper", LEASE_MS // 10)
        assert one.is_mine(30.0)
        assert redis.pttl("sweeper") > LEASE_MS // 2  # the lease is renewed
        assert SweepLease(redis, "sweeper", "w0").is_mine(0.0)  # the next process of that worker
        redis.delete("sweeper")
        assert other.is_mine(30.0)
        assert one.is_mine(31.0)  # it renews the lease only at intervals
        assert not one.is_mine(60.0)
