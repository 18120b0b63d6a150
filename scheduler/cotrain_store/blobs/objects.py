"""Blobs as objects of a store (S3, GCS, Azure), through obstore: each put whole, read whole or by range."""

import errno
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Self

import structlog
from obstore import exceptions
from obstore.store import ObjectStore
from typing_extensions import Buffer, override

from cotrain_store.blobs.protocol import Blob, BlobsUnavailable, Moments
from cotrain_store.failpoints import failpoint

log = structlog.get_logger()

LOG_EVERY_S = 10.0


class Failures:
    """Failures of one process at its object store: all are counted, few are logged. Thread-safe."""

    def __init__(self) -> None:
        self.count: Callable[[str], None] = lambda _: None
        """Counter of failures by operation; set by the process that exports metrics."""
        self._lock = threading.Lock()
        self._logged_at = -LOG_EVERY_S
        self._failed_since = 0.0

    def record(self, operation: str, key: str, reason: str) -> None:
        """Count a failure."""
        self.count(operation)
        now = time.monotonic()
        with self._lock:
            self._failed_since = self._failed_since or now
            is_due = now - self._logged_at >= LOG_EVERY_S
            self._logged_at = now if is_due else self._logged_at
        if is_due:
            log.error("object_store_unavailable", operation=operation, key=key, reason=reason)

    def record_success(self) -> None:
        """Log once that the store is available again."""
        if self._failed_since:
            with self._lock:
                since, self._failed_since = self._failed_since, 0.0
            if since:
                log.info("object_store_available", after_s=round(time.monotonic() - since, 1))


FAILURES = Failures()


#: Key of the id of the Redis that owns these objects. A store without it is not the configured one.
MARK = "belongs-to"
_REFUSALS = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_BUFFER_BYTES = 4 * 1024**2


class Objects:
    """Objects `<prefix>/<key>` of a store. The store itself writes an object atomically."""

    folder = None

    def __init__(self, store: ObjectStore, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix

    def below(self, prefix: str) -> Self:
        """Return the blobs below a prefix."""
        return type(self)(self._store, f"{self._prefix}{prefix}/")

    def put(self, key: str, content: bytes, *, new: bool = False, moments: Moments | None = None) -> None:
        """Write an object; the parts of a large one appear only when all are written."""
        if moments:
            failpoint(moments.half_written)
            failpoint(moments.before_rename)
        with self._failing("put", key):
            self._store.put(self._prefix + key, content, mode="create" if new else "overwrite")
        if moments:
            failpoint(moments.renamed)

    def get(self, key: str, span: tuple[int, int] | None = None) -> bytes:
        """Return the content of an object, or a part of it."""
        with self._failing("get", key):
            if span is None:
                return bytes(self._store.get(self._prefix + key).bytes())
            start, end = span
            try:
                return bytes(self._store.get_range(self._prefix + key, start=start, end=end))
            except exceptions.GenericError:
                if start < min(end, self._store.head(self._prefix + key)["size"]):
                    raise
                return b""  # a store refuses a range that begins after the object's end

    def touch(self, key: str) -> bool:
        """Write an object again, unchanged."""
        try:
            self.put(key, self.get(key))
        except FileNotFoundError:
            return False
        return True

    def open(self, key: str) -> tuple[BinaryIO, Blob]:
        """Open an object; each read of it may raise BlobsUnavailable."""
        with self._failing("get", key):
            blob = self._blob(self._store.head(self._prefix + key))
        return io.BufferedReader(_Reader(self, blob), _BUFFER_BYTES), blob

    def exists(self, key: str) -> bool:
        """Return True if the object exists."""
        try:
            with self._failing("get", key):
                self._store.head(self._prefix + key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, key: str) -> None:
        """Delete an object. Idempotent."""
        with self._failing("delete", key):
            self._store.delete(self._prefix + key)

    def list(self, prefix: str = "") -> Iterator[Blob]:
        """List objects in the order of their keys."""
        whole = (self._prefix + prefix).rstrip("/")
        with self._failing("list", prefix):
            for some in self._store.list(whole or None):
                yield from (self._blob(meta) for meta in some)

    def _blob(self, meta: Mapping[str, Any]) -> Blob:
        mark = f"{meta['e_tag']}:{meta['last_modified'].isoformat()}"
        return Blob(meta["path"].removeprefix(self._prefix), meta["size"], mark)

    @contextmanager
    def _failing(self, operation: str, key: str) -> Iterator[None]:
        """Raise the protocol's exception for an exception of the store."""
        try:
            yield
        except FileNotFoundError as missing:
            if operation == "delete":
                return
            reason = _sentence(missing)
            if self._prefix + key != MARK and not self._is_ours():
                FAILURES.record(operation, key, reason)
                raise BlobsUnavailable(f"There is no {MARK} in the store: {reason}") from missing
            raise FileNotFoundError(errno.ENOENT, reason, key) from missing
        except exceptions.AlreadyExistsError as there:
            raise FileExistsError(key) from there
        except (exceptions.BaseError, ValueError, OSError) as failed:
            if isinstance(failed, BlobsUnavailable):
                raise
            FAILURES.record(operation, key, _sentence(failed))
            raise BlobsUnavailable(_sentence(failed), is_refusal=isinstance(failed, _REFUSALS)) from failed
        else:
            FAILURES.record_success()

    def _is_ours(self) -> bool:
        """Return True if this is the configured store: a missing bucket has no objects, either."""
        try:
            self._store.head(MARK)
        except (exceptions.BaseError, OSError):
            return False
        return True


class _Reader(io.RawIOBase):
    """Object that is read in ranges on demand."""

    def __init__(self, objects: Objects, blob: Blob) -> None:
        self._objects, self._blob, self._at = objects, blob, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blob.size}
        self._at = starts[whence] + offset
        return self._at

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        end = min(self._at + len(view), self._blob.size)
        content = self._objects.get(self._blob.key, (self._at, end)) if self._at < end else b""
        if len(content) < end - self._at:
            raise BlobsUnavailable(f"{self._blob.key} ended too early.")
        view[: len(content)] = content
        self._at += len(content)
        return len(content)


def _sentence(failed: Exception) -> str:
    return str(failed).partition("\n")[0]
