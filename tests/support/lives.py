"""Remaining lifetime of a key, by the store's clock."""

from __future__ import annotations

import time

from cotrain_store import redis_keys
from cotrain_store.redis_client.connection import SyncConnection


def life_ms(redis: SyncConnection, key: str) -> float:
    """Return the remaining lifetime in ms, or -1 for a key that does not expire. Redis itself expires none of these."""
    assert redis.pttl(key) < 0, f"{key} ends by Redis' clock"
    ends = redis.zscore(redis_keys.ends(), key)
    return -1 if ends is None else ends - float(redis.get(redis_keys.clock()) or time.time() * 1000)


def pass_time(redis: SyncConnection, ms: float) -> None:
    """Advance the store's clock, without an expiry."""
    now = float(redis.get(redis_keys.clock()) or time.time() * 1000)
    redis.set(redis_keys.clock(), int(now + ms))
