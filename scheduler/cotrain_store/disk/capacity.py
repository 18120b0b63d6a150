"""Capacity of one API process for new requests, and the storage of their bodies: small ones in Redis, large ones spooled."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import structlog

from cotrain_store.blobs.protocol import BlobsUnavailable
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool
from cotrain_store.errors import Reason, Refused, StoreUnavailable
from cotrain_store.redis_client.connection import Connection

log = structlog.get_logger()

#: Above this share of Redis' memory nothing new is accepted. Without memory a commit fails too, and
#: then no accepted work could ever finish.
MEMORY_SHARE = 0.8
#: Above this share, the unread results of a tenant are limited to UNREAD_SHARE of the memory,
#: whatever its quota. Small results stay there for a day, and those of one tenant must not lock out
#: all others.
CROWDED_SHARE = 0.5
UNREAD_SHARE = 1 / 32
_ASK_MEMORY_EVERY_S = 1.0
UNLIMITED_BYTES = 1 << 62


class StoreBody(Protocol):
    """Function that stores the body of an op, or of several ops."""

    async def __call__(self, body: bytes, copies: int = 1) -> str:
        """Spool a body if `copies` of it are too large for Redis; return its reference, or `inline`.

        Raises:
            DISK_RESERVE_REACHED, StoreUnavailable: the body cannot be written.
        """


class Capacity:
    """Free memory and disk. Without them nothing new is accepted."""

    def __init__(self, connection: Connection, spool: Spool, disk_reserve_bytes: int) -> None:
        self._redis = connection
        self._spool = spool
        self._reserve = disk_reserve_bytes
        self._free_disk = partial(shutil.disk_usage, spool.folder)
        self._memory_asked_at = 0.0
        self._memory_used, self._memory_bytes = 0, 0

    async def check(self) -> None:
        """Return if something new may be accepted.

        Raises:
            DISK_RESERVE_REACHED, STORE_FULL, CONNECTION_LOST: retry later.
        """
        if self._free_disk().free < self._reserve:
            raise Refused(Reason.DISK_RESERVE_REACHED)  # small bodies too: Redis and recovery copies need disk
        now = time.monotonic()
        if now - self._memory_asked_at > _ASK_MEMORY_EVERY_S:
            memory = await self._redis.info("memory")
            self._memory_used, self._memory_bytes = memory["used_memory"], memory["maxmemory"]
            self._memory_asked_at = now
        if 0 < MEMORY_SHARE * self._memory_bytes < self._memory_used:
            raise Refused(Reason.STORE_FULL)

    @property
    def free_disk_bytes(self) -> int:
        """Free bytes of the disk above its reserve; UNLIMITED_BYTES for an object store."""
        if not self._spool.fills_disk:
            return UNLIMITED_BYTES
        return max(0, self._free_disk().free - self._reserve)

    def unread_bytes(self, quota_bytes: int) -> int:
        """Return the limit of one tenant's unread bytes, as of the last `check`."""
        if 0 < CROWDED_SHARE * self._memory_bytes < self._memory_used:
            return min(quota_bytes, int(UNREAD_SHARE * self._memory_bytes))
        return quota_bytes

    @contextmanager
    def storing(self) -> Iterator[StoreBody]:
        """Yield a function that stores bodies. Their files are kept at least until the block ends.

        The block must submit the ops that refer to them.
        """
        refs: list[str] = []

        async def store(body: bytes, copies: int = 1) -> str:
            if len(body) * copies <= INLINE_LIMIT_BYTES:
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
            raise Refused(Reason.DISK_RESERVE_REACHED) from full
        except asyncio.CancelledError:  # the client has disconnected, but the writer may be writing
            durable.add_done_callback(self._settle_abandoned)
            raise

    def _settle_abandoned(self, durable: Future[str]) -> None:
        if not durable.cancelled() and not durable.exception():
            self._spool.settle([durable.result()])
