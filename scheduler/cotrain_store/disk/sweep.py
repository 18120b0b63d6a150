"""Sweeps of files that nothing refers to: their age, and the lease of the worker that removes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.redis_client.connection import SyncConnection  # imports Redis, which a replay does without

#: Age in s after which an unreferenced file may be deleted. A younger one may get a reference soon.
ORPHAN_AGE_S = 600.0


class UnreferencedFiles:
    """Unreferenced files, and the time since when one process has seen them so. Its loss only delays their deletion.

    The date of a file does not show its age, because a host's time of day jumps: it is set, the host sleeps, a virtual
    machine resumes from an image.
    """

    def __init__(self, age_s: float = ORPHAN_AGE_S) -> None:
        self._age_s = age_s
        self._since: dict[str, tuple[str, float]] = {}

    @property
    def is_empty(self) -> bool:
        """True if no file was unreferenced at the last check."""
        return not self._since

    def old(self, unwanted: Mapping[str, str], now: float) -> list[str]:
        """Record all files unreferenced now; return those that were unreferenced and unchanged for the age.

        The mark of a file changes when it is written, replaced or touched (`Blob.mark`). `now` is
        from a monotonic clock, in s (`time.monotonic`).
        """
        before, self._since = self._since, {}
        for key, mark in unwanted.items():
            its, since = before.get(key, (mark, now))
            self._since[key] = mark, since if its == mark else now
        return [key for key, (_, since) in self._since.items() if now - since >= self._age_s]


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
