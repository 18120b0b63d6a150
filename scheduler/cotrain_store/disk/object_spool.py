"""The body spool in an object store: each batch of records is one object, read by range.

A store has no locks, so that what is unreferenced goes only after `OBJECTS_REST` times the age of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typing_extensions import override

from cotrain_store.blobs.protocol import Blobs
from cotrain_store.disk.spool import Spool, SpoolRef, record_of
from cotrain_store.failpoints import failpoint

#: Between the put of a body and its acceptance a process may stand still for an hour (6 x ORPHAN_AGE_S), not longer.
OBJECTS_REST = 6
READERS = 16


class ObjectSpool(Spool):
    """One process's writer of objects, and a reader of every process's. The references are those of `Spool`."""

    fills_disk = False
    #: A put takes tens of milliseconds, and costs money each: what comes in the time goes with it.
    GATHER_S = 0.010

    def __init__(self, blobs: Blobs, writer: str, folder: Path) -> None:
        """`folder` is the host's own data folder, whose disk others fill."""
        self._blobs = blobs
        super().__init__(folder, writer)

    @override
    def settle(self, refs: Iterable[str]) -> None:
        """Hold nothing: an object that has its name stays for long."""

    @override
    def read_each(self, refs: Sequence[str]) -> list[bytes | None]:
        """Read several at once: each waits for the network, and not for the others."""
        if len(refs) < 2:
            return super().read_each(refs)
        with ThreadPoolExecutor(min(READERS, len(refs)), thread_name_prefix="bodies") as readers:
            return list(readers.map(self._intact, refs))

    @override
    def _append_all(self, payloads: list[bytes]) -> list[str]:
        segment, offset = f"{self._writer}-{self._count}", 0
        self._count += 1  # also of one that fails: it may be there all the same
        records, refs = [], []
        for payload in payloads:
            record, digest = record_of(payload)
            records.append(record)
            refs.append(str(SpoolRef(segment, offset, len(payload), digest)))
            offset += len(record)
        for moment in ("spool.before_write", "spool.half_written", "spool.before_sync"):
            failpoint(moment, refs)
        self._blobs.put(segment, b"".join(records))
        failpoint("spool.after_sync", refs)
        return refs

    @override
    def _read(self, segment: str, start: int, end: int) -> bytes:
        return self._blobs.get(segment, (start, end))
