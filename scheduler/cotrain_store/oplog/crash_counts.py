"""During which parts of steps processes crashed, for the next process to be careful with.

A part of a step is named by the request that it begins with, and anything behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.keys import fleet_keys

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId
    from cotrain_store.redis_client.connection import SyncConnection


class CrashCounts:
    """The crashes in one pool."""

    def __init__(self, connection: SyncConnection, pool: PoolId) -> None:
        self._redis = connection
        self._key = fleet_keys.crash_counts(pool)

    def by_part(self) -> dict[str, int]:
        """Read during which parts of steps processes crashed, and how often."""
        rows = self._redis.hgetall(self._key)
        return {part.decode(): int(count) for part, count in rows.items()}

    def risk(self, part: str) -> None:
        """Count a crash in advance: `survived` takes it back, if the process lives to call it."""
        self._redis.hincrby(self._key, part, 1)

    def survived(self, part: str) -> None:
        """Take back what `risk` counted."""
        self._redis.hdel(self._key, part)
