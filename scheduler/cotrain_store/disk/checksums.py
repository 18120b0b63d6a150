"""Checksums of the files of adapters, in a file `SHA256SUMS` next to them.

It is written with the files and checked before they are read. Its format is that of `sha256sum`, so `sha256sum -c
SHA256SUMS` checks a folder as well. Files without it are not used, because a damaged one could not be detected.

No Redis is imported here, because the replay tool reads checkpoints without it.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

SUMS = "SHA256SUMS"
REMEDY = (
    f"Save the checkpoint again, or have the operator restore {SUMS} from a backup (of files that are known to be "
    f"right, `sha256sum * > {SUMS}` writes it anew)."
)
#: Format of `sha256sum`, with or without `--binary`.
_ROW = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def sums_of(contents: Mapping[str, bytes]) -> str:
    """Return the content of SUMS for files of these names and contents."""
    rows = ((hashlib.sha256(content).hexdigest(), name) for name, content in contents.items())
    return "".join(f"{digest}  {name}\n" for digest, name in rows)


def read_sums(content: bytes) -> dict[str, str]:
    """Return the content of SUMS: name → SHA-256 (hex)."""
    rows = map(_ROW.fullmatch, content.decode(errors="replace").splitlines())
    return {row[2]: row[1] for row in rows if row}


def fault_of(sums: Mapping[str, str] | None, names: Iterable[str]) -> str | None:
    """Return the reason why these files cannot be checked, or None. `sums` is None without a file SUMS."""
    if sums is None:
        return f"{SUMS} is missing"
    return next((f"{SUMS} has no line for {name}" for name in names if name not in sums), None)
