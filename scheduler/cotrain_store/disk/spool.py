"""Body spool: an append-only log on disk for bodies and results too large for Redis.

A record is durable before its reference is returned. Concurrent writers of one process share one
fdatasync (group commit): 64 KB bodies are 36 times faster than as Redis values (reliability §2.2).

A writer holds a lock on each segment that it may still extend, or whose references are not accepted yet
(`Spool.settle`). A locked segment is never swept, whatever its age. The end of a process releases its locks.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import queue
import re
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import structlog
from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.blobs.folder import make_folder, passes, sync_folder
from cotrain_store.blobs.protocol import Blobs
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_store.redis_client.connection import SyncConnection
from cotrain_store.redis_client.scripts import sync_script

log = structlog.get_logger()

#: Larger bodies go to the spool; smaller ones are stored with their op in Redis.
INLINE_LIMIT_BYTES = 16 * 1024
SEGMENT_BYTES = 64 * 1024**2
#: Size from which a batch does not wait for further records.
GATHERED_BYTES = 4 * 1024**2
#: A writer does not extend a segment that was idle for this long, so that it can be swept.
REST_S = 300.0
#: Prefix of segments of results.
RESULTS = "answers-"
#: Maximum number of writes of a batch whose file was removed before it was synced.
_TRIES = 3

_HEADER = struct.Struct("<4sQ16s")
_MAGIC = b"CTS1"
_REF = re.compile(r"spool:([A-Za-z0-9][A-Za-z0-9_.-]*):(\d+):(\d+):([0-9a-f]{32})")
_CLOSE = None


@dataclass(frozen=True)
class SpoolRef:
    """Position of a record: segment, byte offset of its header, payload length, digest."""

    segment: str
    offset: int
    length: int
    digest: str

    @override
    def __str__(self) -> str:
        return f"spool:{self.segment}:{self.offset}:{self.length}:{self.digest}"

    @classmethod
    def parse(cls, ref: str) -> SpoolRef:
        """Return the parsed reference; raises SpoolCorrupt if it is invalid."""
        match = _REF.fullmatch(ref)
        if not match:
            raise SpoolCorrupt(f"Not a spool reference: {ref!r}.")
        return cls(match[1], int(match[2]), int(match[3]), match[4])


@dataclass
class _Segment:
    """A file that is locked while it is open; `unsettled` counts returned references."""

    name: str
    file: int
    size: int = 0
    unsettled: int = 0


class Spool:
    """One process's writer, and a reader of every process's segments.

    `writer` must be new for every process start: no other process may append to its segments.
    """

    #: True if records use space on the disk of `folder`.
    fills_disk = True
    #: Time in s that a batch waits for more; 0 for files, whose next batch gathers during the sync.
    GATHER_S = 0.0

    def __init__(self, folder: Path, writer: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self._writer = writer
        self._segment_bytes = segment_bytes
        self._waiting: queue.SimpleQueue[tuple[bytes, Future[str]] | None] = queue.SimpleQueue()
        self._segment: _Segment | None = None
        self._kept: dict[str, _Segment] = {}
        self._holding = threading.Lock()
        self._count = 0
        make_folder(folder)
        self._thread = threading.Thread(target=self._write_loop, name="spool", daemon=True)
        self._thread.start()

    def put(self, payload: bytes) -> Future[str]:
        """Append a record; the future returns its reference once it is durable.

        Its segment is kept until the reference is settled, and afterwards while it is referenced.
        """
        durable: Future[str] = Future()
        self._waiting.put((payload, durable))
        return durable

    def settle(self, refs: Iterable[str]) -> None:
        """Mark references as accepted or abandoned. Those of other writers are ignored."""
        with self._holding:
            for ref in refs:
                if segment := self._kept.get(SpoolRef.parse(ref).segment):
                    segment.unsettled -= 1
                    self._let_go(segment)

    def read(self, ref: str) -> bytes:
        """Return the payload of a record.

        Raises:
            SpoolCorrupt: it is missing, or does not match.
            OSError: this process cannot read now; the record may be intact.
        """
        at = SpoolRef.parse(ref)
        try:
            record = self._read(at.segment, at.offset, at.offset + _HEADER.size + at.length)
            magic, length, digest = _HEADER.unpack_from(record)
            payload = record[_HEADER.size :]
        except (OSError, struct.error) as broken:
            if passes(broken):
                raise
            raise SpoolCorrupt(f"Spool record {ref} cannot be read: {broken}.") from broken
        intact = magic == _MAGIC and length == len(payload) == at.length
        if not intact or _digest(payload) != digest or digest.hex() != at.digest:
            raise SpoolCorrupt(f"Spool record {ref} does not match its digest.")
        return payload

    def read_each(self, refs: Sequence[str]) -> list[bytes | None]:
        """Return the payloads of records; None if missing or corrupt. Raises OSError, as `read` does."""
        return [self._intact(ref) for ref in refs]

    def _intact(self, ref: str) -> bytes | None:
        try:
            return self.read(ref)
        except SpoolCorrupt:
            return None

    def _read(self, segment: str, start: int, end: int) -> bytes:
        with (self.folder / segment).open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def close(self) -> None:
        """Write the waiting records and stop."""
        self._waiting.put(_CLOSE)
        self._thread.join()

    def _write_loop(self) -> None:
        while (first := self._next()) is not _CLOSE:
            self._write(self._batch(first))
        self._leave_segment()
        with self._holding:
            for segment in self._kept.values():
                os.close(segment.file)
            self._kept.clear()

    def _next(self) -> tuple[bytes, Future[str]] | None:
        try:
            return self._waiting.get(timeout=REST_S)
        except queue.Empty:
            self._leave_segment()
            return self._waiting.get()

    def _batch(self, first: tuple[bytes, Future[str]]) -> list[tuple[bytes, Future[str]]]:
        """Return the waiting records, and those of the next GATHER_S while the batch is small."""
        batch, size = [first], len(first[0])
        until = time.monotonic() + self.GATHER_S
        while size < self._segment_bytes:
            wait_s = max(0.0, until - time.monotonic()) if size < GATHERED_BYTES else 0.0
            try:
                following = self._waiting.get(timeout=wait_s)
            except queue.Empty:
                break
            if following is _CLOSE:
                self._waiting.put(_CLOSE)
                break
            batch.append(following)
            size += len(following[0])
        return batch

    def _write(self, batch: list[tuple[bytes, Future[str]]]) -> None:
        # A caller that gave up has cancelled its future; from here on none can.
        batch = [put for put in batch if put[1].set_running_or_notify_cancel()]
        payloads = [payload for payload, _ in batch]
        try:
            refs = self._append_all(payloads)
        except OSError as failed:
            self._leave_segment()  # a half-written tail is never referenced
            for _, durable in batch:
                durable.set_exception(failed)
            return
        for (_, durable), ref in zip(batch, refs, strict=True):
            durable.set_result(ref)

    def _append_all(self, payloads: list[bytes]) -> list[str]:
        """Append records durably to a file that still has its name; return their references."""
        for _ in range(_TRIES):
            segment = self._open_segment()
            failpoint("spool.before_write")
            refs = [str(self._append(segment, payload)) for payload in payloads]
            failpoint("spool.before_sync", refs)
            os.fdatasync(segment.file)
            failpoint("spool.after_sync", refs)
            if _has_its_name(self.folder / segment.name, segment.file):
                with self._holding:
                    segment.unsettled += len(refs)
                return refs
            log.error("segment_removed", segment=segment.name)
            self._leave_segment()
        raise OSError(errno.ENOENT, "Another process removes the files of the spool")

    def _append(self, segment: _Segment, payload: bytes) -> SpoolRef:
        header, digest = header_of(payload)
        half = len(payload) // 2
        _write_all(segment.file, header)
        _write_all(segment.file, memoryview(payload)[:half])
        failpoint("spool.half_written")
        _write_all(segment.file, memoryview(payload)[half:])
        ref = SpoolRef(segment.name, segment.size, len(payload), digest)
        segment.size += len(header) + len(payload)
        return ref

    def _open_segment(self) -> _Segment:
        if self._segment and self._segment.size < self._segment_bytes:
            return self._segment
        self._leave_segment()
        name = f"{self._writer}-{self._count}"
        self._count += 1
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            sync_folder(self.folder)
        except OSError:
            os.close(file)
            raise
        self._segment = self._kept[name] = _Segment(name, file)
        return self._segment

    def _leave_segment(self) -> None:
        """Stop extending the current segment."""
        with self._holding:
            segment, self._segment = self._segment, None
            if segment:
                self._let_go(segment)

    def _let_go(self, segment: _Segment) -> None:
        if segment is not self._segment and segment.unsettled <= 0:
            del self._kept[segment.name]
            os.close(segment.file)


def header_of(payload: bytes) -> tuple[bytes, str]:
    """Return the bytes of a record before its payload, and the digest (hex) of the payload."""
    digest = _digest(payload)
    return _HEADER.pack(_MAGIC, len(payload), digest), digest.hex()


def _write_all(file: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(file, left) :]


def _has_its_name(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def unwritten_segments(spool: Blobs) -> dict[str, str]:
    """Return the segments that no process holds, each with its mark: they never get new references."""
    folder = spool.folder
    found = {blob.key: blob.mark for blob in spool.list()}
    return {key: mark for key, mark in found.items() if not (folder and _is_locked(folder / key))}


def _is_locked(segment: Path) -> bool:
    try:
        file = os.open(segment, os.O_RDONLY)
    except FileNotFoundError:  # another worker has just removed it
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or a disk without locks: it is kept
        return True
    finally:
        os.close(file)
    return False


def new_writer(process: str) -> str:
    """Return a unique writer name for this process start: process, time, pid."""
    return f"{process}-{time.time_ns():x}-{os.getpid():x}"


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:16]


_AT_ONCE = 500


class SpoolReferences:
    """Reference counts in Redis, for the worker that sweeps."""

    def __init__(self, connection: SyncConnection) -> None:
        self._redis = connection
        self._sweep = sync_script(connection, "spool_sweep")

    def referenced(self) -> set[str]:
        """Return the segments that an op or a result still needs."""
        counts = (redis_keys.spool_segment_refs(), redis_keys.spool_results())
        return {name.decode() for count in counts for name in self._redis.hkeys(count)}

    def close(self, segments: Sequence[str]) -> list[str]:
        """Close segments to new references; return those without any, to be removed.

        A process that was suspended between the write and the acceptance of a body must then send
        it again; a worker writes its results again.
        """
        closed: list[str] = []
        for start in range(0, len(segments), _AT_ONCE):
            some = segments[start : start + _AT_ONCE]
            args = {"segments": list(some), "ttl_ms": redis_keys.SWEPT_TTL_MS}
            closed += [name.decode() for name in self._sweep(args)]
        return closed
