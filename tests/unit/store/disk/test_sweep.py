"""Sweeps: the lease of the sweeper, and the age of unreferenced files."""

from __future__ import annotations

from cotrain_store.disk.sweep import LEASE_MS, SweepLease, UnreferencedFiles
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


def test_a_file_is_removed_after_it_was_unwanted_for_long() -> None:
    unwanted = UnreferencedFiles(10)
    assert unwanted.old({"a": "1"}, 100) == []
    assert unwanted.old({"a": "1", "b": "1"}, 109) == []
    assert unwanted.old({"a": "1", "b": "1"}, 110) == ["a"]
    assert unwanted.old({"b": "1"}, 119) == ["b"]


def test_the_age_of_a_file_wanted_in_between_restarts() -> None:
    unwanted = UnreferencedFiles(10)
    unwanted.old({"a": "1"}, 100)
    unwanted.old({}, 105)
    assert unwanted.is_empty
    assert unwanted.old({"a": "1"}, 110) == []
    assert unwanted.old({"a": "1"}, 120) == ["a"]


def test_the_age_of_a_touched_or_replaced_file_restarts() -> None:
    unwanted = UnreferencedFiles(10)
    unwanted.old({"same": "1", "touched": "1"}, 100)
    assert unwanted.old({"same": "1", "touched": "2"}, 110) == ["same"]
    assert unwanted.old({"same": "1", "touched": "2"}, 120) == ["same", "touched"]
