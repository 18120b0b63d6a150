"""Storage of bodies and results: small ones in Redis, large ones in the spool. Without capacity nothing new is accepted.

A spooled body or result has a reference in Redis. The file also defines the results that the store itself gives to
requests of ended runs, and to cancelled sample requests.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import structlog

from cotrain_store import redis_keys
from cotrain_store.blobs.protocol import BlobsUnavailable
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool
from cotrain_store.errors import Reason, Refused, StoreUnavailable
from cotrain_store.messages.ops import Result, ResultKind
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
    """Free capacity as seen by one API process, and the storage of bodies."""

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


#: Result of requests of a run that was closed before they were planned.
UNLOADED = Result.failed("The training run was unloaded before this request ran.", "user")
#: Result of requests of a run that could not be restored after a crash.
RUN_STOPPED = Result.failed(
    "The training run was stopped: its log could not be replayed to the stored results.", "server"
)
#: Result of a request that its client cancelled.
CANCELLED = Result.failed("Cancelled by the client.", "user")
#: The same as an argument of the scripts.
CANCEL = {
    "result": CANCELLED.encode().decode(),
    "ttl_ms": redis_keys.SMALL_RESULT_TTL_MS,
    "size": len(CANCELLED.payload),
}
#: In ms: the time that the record of an ended request outlives its result, and the time that its end stays published.
TTL_MS = {"record": redis_keys.SAMPLE_RECORD_EXTRA_MS, "published": redis_keys.COMPLETION_TTL_MS}
_SPOOLED = {
    ResultKind.JSON: ResultKind.SPOOLED_JSON,
    ResultKind.PASS: ResultKind.SPOOLED_PASS,
    ResultKind.SAMPLE: ResultKind.SPOOLED_SAMPLE,
}
_WHOLE = {spooled: whole for whole, spooled in _SPOOLED.items()}


@contextmanager
def encoded_results(results: Sequence[Result], spool: Spool) -> Iterator[Sequence[tuple[bytes, int]]]:
    """Encode results for Redis, each with its lifetime in ms; large ones are on disk afterwards.

    Their files are kept at least until the block ends, which must store the references to them.
    """
    puts = {
        index: spool.put(result.payload)  # all of them share one fsync
        for index, result in enumerate(results)
        if result.kind in _SPOOLED and len(result.payload) > INLINE_LIMIT_BYTES
    }
    try:
        yield [
            (Result(_SPOOLED[result.kind], puts[index].result().encode()).encode(), redis_keys.LARGE_RESULT_TTL_MS)
            if index in puts
            else (result.encode(), redis_keys.SMALL_RESULT_TTL_MS)
            for index, result in enumerate(results)
        ]
    finally:
        if puts:
            spool.settle(put.result() for put in puts.values() if not put.exception())


def stored_results(
    results: Sequence[Result], spool: Spool, store: Callable[[Sequence[tuple[bytes, int]]], bytes]
) -> bytes:
    """Call `store` with results encoded by `encoded_results`, and return the script's answer.

    If the files were removed first, because this process was suspended for long, repeat with new files.
    """
    while True:
        with encoded_results(results, spool) as encoded:
            answer = store(encoded)
        if answer != b"SWEPT":
            return answer


def is_spooled(result: Result) -> bool:
    """Return True if a result's payload is on disk."""
    return result.kind in _WHOLE


def whole_result(result: Result, spool: Spool) -> Result:
    """Return a spooled result with its payload; raises SpoolCorrupt if it is missing."""
    return Result(_WHOLE[result.kind], spool.read(result.payload.decode()))
