"""What holds the bytes that are too large for Redis: put whole or not at all, and read by name."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self


class BlobsUnavailable(OSError):
    """The object store refuses, fails or does not answer now, which says nothing of what it holds."""

    def __init__(self, reason: str, *, is_refusal: bool = False) -> None:
        """A refusal will be the same when it is tried again: no such bucket, other credentials."""
        super().__init__(errno.EHOSTDOWN, reason)
        self.is_refusal = is_refusal


@dataclass(frozen=True)
class Blob:
    """One that is there: its key, its bytes, and a mark that changes when it is written again."""

    key: str
    size: int
    mark: str

    @property
    def is_unfinished(self) -> bool:
        """Tell whether a process began to write this and has not ended: no reader is to know of it."""
        return any(part.startswith(".") for part in self.key.split("/"))


class Moments(NamedTuple):
    """The failpoints on the way of a put."""

    half_written: str
    before_rename: str
    renamed: str


class Blobs(Protocol):
    """Bytes by key. A key is a path: words that are separated by `/`.

    All raise OSError where what they do cannot be done now: a full disk, a store that does not answer
    (BlobsUnavailable). Nothing is half done then: a key names all that was put, or what it did before.
    """

    @property
    def folder(self) -> Path | None:
        """The folder in which others find these as files; None where there are no files."""
        ...

    def below(self, prefix: str) -> Self:
        """Give those whose keys begin with `prefix/`, by the rest of their keys."""
        ...

    def put(
        self, key: str, content: bytes, *, new: bool = False, moments: Moments | None = None
    ) -> None:
        """Write one, durable when this returns, past failpoints on the way.

        Raises FileExistsError where `new` is asked for and there is one.
        """
        ...

    def get(self, key: str, span: tuple[int, int] | None = None) -> bytes:
        """Read one, or from a byte of it to before another; less where it ends earlier.

        Raises FileNotFoundError.
        """
        ...

    def touch(self, key: str) -> bool:
        """Give one another mark, so that it is young again to all who look for what may go; False for none."""
        ...

    def open(self, key: str) -> tuple[BinaryIO, Blob]:
        """Open one to read it in parts. Raises FileNotFoundError.

        A file that is open is read to its end, whatever becomes of its key; an object may be gone before.
        """
        ...

    def exists(self, key: str) -> bool:
        """Tell whether there is one."""
        ...

    def delete(self, key: str) -> None:
        """Remove one. Twice is harmless."""
        ...

    def list(self, prefix: str = "") -> Iterator[Blob]:
        """List those below `prefix`, by their keys; also those that are unfinished."""
        ...
