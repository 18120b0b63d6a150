"""Of all workers that could remove what nothing refers to from an object store, one does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.redis_client.connection import SyncConnection

LEASE_MS = 60_000
_RENEW_S = 20.0


class SweepLease:
    """The right to sweep what `key` stands for. Two that hold it at once only look twice."""

    def __init__(self, connection: SyncConnection, key: str, holder: str) -> None:
        self._redis = connection
        self._key = key
        self._holder = holder
        self._is_mine = False
        self._ask_at = -math.inf

    def is_mine(self, now: float) -> bool:
        """Take it, keep it, or tell that another worker has it; `now` is of the monotonic clock, in s."""
        if now >= self._ask_at:
            self._ask_at = now + _RENEW_S
            taken = self._redis.set(self._key, self._holder, nx=True, px=LEASE_MS)
            self._is_mine = bool(taken) or self._redis.get(self._key) == self._holder.encode()
            if self._is_mine and not taken:
                self._redis.pexpire(self._key, LEASE_MS)
        return self._is_mine
