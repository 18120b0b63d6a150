"""The SHA-256 of an adapter's files, in a file next to them: written with them, checked before they are read.

In the form of `sha256sum`, so that `sha256sum -c SHA256SUMS` checks a folder as well. Files without it are not
used: nothing tells a damaged one from a whole one.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SUMS = "SHA256SUMS"
REMEDY = (
    f"Save the checkpoint again, or have the operator restore {SUMS} from a backup (of files that are known to be "
    f"right, `sha256sum * > {SUMS}` writes it anew)."
)
#: As `sha256sum` writes it, with or without `--binary`.
_ROW = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def sums_of(contents: Mapping[str, bytes]) -> str:
    """Write the content of SUMS for files of these names and contents."""
    rows = ((hashlib.sha256(content).hexdigest(), name) for name, content in contents.items())
    return "".join(f"{digest}  {name}\n" for digest, name in rows)


def read_sums(content: bytes) -> dict[str, str]:
    """Read the content of SUMS: name → SHA-256 (hex)."""
    rows = map(_ROW.fullmatch, content.decode(errors="replace").splitlines())
    return {row[2]: row[1] for row in rows if row}


def fault_of(sums: Mapping[str, str] | None, names: Iterable[str]) -> str | None:
    """Return why these files cannot be checked (None: there is no file SUMS), or None where they can be."""
    if sums is None:
        return f"{SUMS} is missing"
    return next((f"{SUMS} has no line for {name}" for name in names if name not in sums), None)
