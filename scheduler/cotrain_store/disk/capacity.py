"""Room for what is accepted: memory in Redis, disk for the rest. Without it nothing new is taken."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import structlog

from cotrain_store.blobs.protocol import BlobsUnavailable
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool
from cotrain_store.errors import DiskReserveReached, StoreFull, StoreUnavailable
from cotrain_store.redis_client.connection import CONNECTION_LOST, Connection

#: Spools a body that is too large for Redis, and gives its reference, or `inline`.
#: Raises DiskReserveReached, StoreUnavailable where it cannot be written.
StoreBody: TypeAlias = Callable[[bytes], Awaitable[str]]

log = structlog.get_logger()

#: Above this share of Redis' memory nothing new is taken: without memory a commit fails too, and
#: then nothing that was accepted could ever finish.
MEMORY_SHARE = 0.8
#: Above this share a tenant may have no more unread than UNREAD_SHARE of the memory, whatever its quota:
#: small results lie there for a day, and one tenant's must not keep all others out.
CROWDED_SHARE = 0.5
UNREAD_SHARE = 1 / 32
_ASK_MEMORY_EVERY_S = 1.0
UNLIMITED_BYTES = 1 << 62


class Capacity:
    """One API process's view of what is left, and its way to store a body where it belongs."""

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

    @property
    def free_disk_bytes(self) -> int:
        """Say what is free of the disk, above its reserve; of an object store, more than there ever is."""
        if not self._spool.fills_disk:
            return UNLIMITED_BYTES
        return max(0, self._free_disk().free - self._reserve)

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

    @contextmanager
    def storing(self) -> Iterator[StoreBody]:
        """Give a way to store bodies. Their files stay for as long as the block takes, which is to accept
        what refers to them.
        """
        refs: list[str] = []

        async def store(body: bytes) -> str:
            if len(body) <= INLINE_LIMIT_BYTES:
                return "inline"
            refs.append(await self._spooled(body))
            return refs[-1]

        try:
            yield store
        finally:
            self._spool.settle(refs)

    async def _spooled(self, body: bytes) -> str:
        durable = self._spool.put(body)
        try:
            return await asyncio.wrap_future(durable)
        except BlobsUnavailable as unavailable:
            raise StoreUnavailable("The object store takes nothing for now.") from unavailable
        except OSError as full:
            log.error("body_not_written", reason=full.strerror)
            raise DiskReserveReached from full
        except asyncio.CancelledError:  # its client has gone, and the writer may be at it
            durable.add_done_callback(self._settle_unheard)
            raise

    def _settle_unheard(self, durable: Future[str]) -> None:
        if not durable.cancelled() and not durable.exception():
            self._spool.settle([durable.result()])
