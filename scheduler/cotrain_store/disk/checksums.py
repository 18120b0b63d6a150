"""The SHA-256 of a folder's files, in a file next to them: written with them, checked before they go out.

In the form of `sha256sum`, so that `sha256sum -c SHA256SUMS` checks a folder as well.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUMS = "SHA256SUMS"
_READ_BYTES = 1024**2


def sums_of(contents: Mapping[str, bytes]) -> str:
    """Write the content of SUMS for files of these names and contents."""
    rows = ((hashlib.sha256(content).hexdigest(), name) for name, content in contents.items())
    return "".join(f"{digest}  {name}\n" for digest, name in rows)


def read_sums(folder: Path) -> dict[str, str]:
    """Read name → SHA-256 (hex); empty for a folder of an earlier version, which has no SUMS.

    Raises:
        OSError: it cannot be read.
    """
    try:
        rows = (folder / SUMS).read_bytes().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    parts = (row.partition("  ") for row in rows)
    return {name: digest for digest, _, name in parts}


def sum_of(content: BinaryIO) -> str:
    """Hash an open file from its beginning; its place is the beginning again. Raises OSError."""
    hasher = hashlib.sha256()
    while block := content.read(_READ_BYTES):
        hasher.update(block)
    content.seek(0)
    return hasher.hexdigest()
