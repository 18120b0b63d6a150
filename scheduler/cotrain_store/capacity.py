"""Room for what is accepted: memory in Redis, disk for the rest. Without it nothing new is taken."""

from __future__ import annotations

import asyncio
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

import structlog

from cotrain_store.connection import CONNECTION_LOST
from cotrain_store.errors import DiskReserveReached, StoreFull, StoreUnavailable
from cotrain_store.spool import INLINE_LIMIT_BYTES

if TYPE_CHECKING:
    from cotrain_store.connection import Connection
    from cotrain_store.spool import Spool

log = structlog.get_logger()

#: Above this share of Redis' memory nothing new is taken: without memory a commit fails too, and
#: then nothing that was accepted could ever finish.
MEMORY_SHARE = 0.8
#: Above this share a tenant may have no more unread than UNREAD_SHARE of the memory, whatever its quota:
#: small results lie there for a day, and one tenant's must not keep all others out.
CROWDED_SHARE = 0.5
UNREAD_SHARE = 1 / 32
_ASK_MEMORY_EVERY_S = 1.0


class Capacity:
    """One API process's view of what is left, and its way to put a body where it belongs."""

    def __init__(self, connection: Connection, spool: Spool, disk_reserve_bytes: int) -> None:
        self._redis = connection
        self._spool = spool
        self._reserve = disk_reserve_bytes
        self._free_disk = partial(shutil.disk_usage, spool.folder)
        self._memory_asked_at = 0.0
        self._memory_used, self._memory_bytes = 0, 0

    async def check(self) -> None:
        """Return when something new may be taken.

        Raises:
            DiskReserveReached, StoreFull, StoreUnavailable: not now.
        """
        if self._free_disk().free < self._reserve:
            raise DiskReserveReached  # small ones too: Redis needs disk, and so do recovery copies
        now = time.monotonic()
        if now - self._memory_asked_at > _ASK_MEMORY_EVERY_S:
            await self._ask_memory()
            self._memory_asked_at = now
        if 0 < MEMORY_SHARE * self._memory_bytes < self._memory_used:
            raise StoreFull

    def unread_bytes(self, quota_bytes: int) -> int:
        """Say how much one tenant may have unread, as of the last `check`."""
        if 0 < CROWDED_SHARE * self._memory_bytes < self._memory_used:
            return min(quota_bytes, int(UNREAD_SHARE * self._memory_bytes))
        return quota_bytes

    async def _ask_memory(self) -> None:
        try:
            memory = await self._redis.info("memory")
        except CONNECTION_LOST as lost:
            raise StoreUnavailable from lost
        self._memory_used, self._memory_bytes = memory["used_memory"], memory["maxmemory"]

    async def place(self, body: bytes) -> str:
        """Spool a body that is too large for Redis; return its reference, or `inline`."""
        if len(body) <= INLINE_LIMIT_BYTES:
            return "inline"
        try:
            return await asyncio.wrap_future(self._spool.put(body))
        except OSError as full:
            log.error("body_not_written", reason=full.strerror)
            raise DiskReserveReached from full
