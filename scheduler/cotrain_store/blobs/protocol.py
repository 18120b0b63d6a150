"""Protocol of the storage for bytes too large for Redis: atomic puts, and reads by name."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self


class BlobsUnavailable(OSError):
    """The object store refuses, fails or does not answer now. Its content may be intact."""

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        """Create the error. `is_refusal` is True if a retry gives the same: no such bucket, wrong credentials."""
        super().__init__(errno.EHOSTDOWN, reason)
        self.is_refusal = is_refusal


@dataclass(frozen=True)
class Blob:
    """An existing blob: key, size in bytes, and a mark that changes when it is written again."""

    key: str
    size: int
    mark: str

    @property
    def is_unfinished(self) -> bool:
        """True if a process began to write this and has not finished; readers must ignore it."""
        return any(part.startswith(".") for part in self.key.split("/"))


class Moments(NamedTuple):
    """Failpoints during a put."""

    half_written: str
    before_rename: str
    renamed: str


class Blobs(Protocol):
    """Bytes by key. A key is a path of words separated by `/`.

    All methods raise OSError if they cannot be done now: a full disk, or a store that does not answer
    (BlobsUnavailable). They are atomic: a key then names the whole new content, or the previous content.
    """

    @property
    def folder(self) -> Path | None:
        """Folder that contains the blobs as files; None without files."""

    def below(self, prefix: str) -> Self:
        """Return the blobs whose keys begin with `prefix/`, by the rest of their keys."""

    def put(self, key: str, content: bytes, *, new: bool = False, moments: Moments | None = None) -> None:
        """Write a blob, durable when this returns, with failpoints.

        Raises FileExistsError if `new` is set and the blob exists.
        """

    def get(self, key: str, span: tuple[int, int] | None = None) -> bytes:
        """Read a blob, or a byte range of it; shorter if the blob ends earlier.

        Raises FileNotFoundError.
        """

    def touch(self, key: str) -> bool:
        """Change the mark of a blob, so that sweeps treat it as new. Return False if it does not exist."""

    def open(self, key: str) -> tuple[BinaryIO, Blob]:
        """Open a blob to read it in parts. Raises FileNotFoundError.

        An open file can be read to its end after its key is deleted; an object may disappear earlier.
        """

    def exists(self, key: str) -> bool:
        """Return True if the blob exists."""

    def delete(self, key: str) -> None:
        """Delete a blob. Idempotent."""

    def list(self, prefix: str = "") -> Iterator[Blob]:
        """List the blobs below `prefix`, by key, including unfinished ones."""
