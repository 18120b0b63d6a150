"""The SHA-256 of an adapter's files, in a file next to them: written with them, checked before they go out.

In the form of `sha256sum`, so that `sha256sum -c SHA256SUMS` checks a folder as well.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SUMS = "SHA256SUMS"


def sums_of(contents: Mapping[str, bytes]) -> str:
    """Write the content of SUMS for files of these names and contents."""
    rows = ((hashlib.sha256(content).hexdigest(), name) for name, content in contents.items())
    return "".join(f"{digest}  {name}\n" for digest, name in rows)


def read_sums(content: bytes) -> dict[str, str]:
    """Read the content of SUMS: name → SHA-256 (hex)."""
    parts = (row.partition("  ") for row in content.decode(errors="replace").splitlines())
    return {name: digest for digest, _, name in parts}
