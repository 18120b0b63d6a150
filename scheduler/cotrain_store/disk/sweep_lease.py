"""Lease of the worker that removes unused files of an object store."""

import math

from cotrain_store.redis_client.connection import SyncConnection

LEASE_MS = 60_000
_RENEW_S = 20.0


class SweepLease:
    """Lease to sweep the files of `key`. Two simultaneous holders do the same work twice, without harm."""

    def __init__(self, connection: SyncConnection, key: str, holder: str) -> None:
        self._redis = connection
        self._key = key
        self._holder = holder
        self._is_mine = False
        self._renew_at = -math.inf

    def is_mine(self, now: float) -> bool:
        """Acquire or renew the lease. Return False if another worker holds it. `now` is monotonic time in s."""
        if now >= self._renew_at:
            self._renew_at = now + _RENEW_S
            taken = self._redis.set(self._key, self._holder, nx=True, px=LEASE_MS)
            self._is_mine = bool(taken) or self._redis.get(self._key) == self._holder.encode()
            if self._is_mine and not taken:
                self._redis.pexpire(self._key, LEASE_MS)
        return self._is_mine
