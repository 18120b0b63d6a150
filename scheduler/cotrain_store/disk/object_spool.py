"""Body spool in an object store: each batch of records is one object, read by range.

A store has no locks, so an unreferenced object is deleted only after `OBJECTS_REST` times the age of a file.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typing_extensions import override

from cotrain_store.blobs.protocol import Blobs
from cotrain_store.disk.spool import Spool, SpoolRef, header_of
from cotrain_store.failpoints import failpoint

#: Factor of ORPHAN_AGE_S. A process may be suspended for up to an hour between the put of a body
#: and its acceptance.
OBJECTS_REST = 6
READERS = 16


class ObjectSpool(Spool):
    """One process's writer of objects, and a reader of every process's. References have the format of `Spool`."""

    fills_disk = False
    #: A put takes tens of milliseconds and has a price, so a batch gathers for this time, in s.
    GATHER_S = 0.010

    def __init__(self, blobs: Blobs, writer: str, folder: Path) -> None:
        """Start a writer. `folder` is the host's data folder, whose free space `Capacity` checks."""
        self._blobs = blobs
        super().__init__(folder, writer)

    @override
    def settle(self, refs: Iterable[str]) -> None:
        """Do nothing: an object is kept long after its put."""

    @override
    def read_each(self, refs: Sequence[str]) -> list[bytes | None]:
        """Read several records in parallel, because each waits for the network."""
        if len(refs) < 2:
            return super().read_each(refs)
        with ThreadPoolExecutor(min(READERS, len(refs)), thread_name_prefix="bodies") as readers:
            return list(readers.map(self._intact, refs))

    @override
    def _append_all(self, payloads: list[bytes]) -> list[str]:
        segment, offset = f"{self._writer}-{self._count}", 0
        self._count += 1  # also after a failed put, whose object may exist
        parts, refs = list[bytes](), []
        for payload in payloads:
            header, digest = header_of(payload)
            parts += (header, payload)
            refs.append(str(SpoolRef(segment, offset, len(payload), digest)))
            offset += len(header) + len(payload)
        for moment in ("spool.before_write", "spool.half_written", "spool.before_sync"):
            failpoint(moment, refs)
        self._blobs.put(segment, b"".join(parts))
        failpoint("spool.after_sync", refs)
        return refs

    @override
    def _read(self, segment: str, start: int, end: int) -> bytes:
        return self._blobs.get(segment, (start, end))
