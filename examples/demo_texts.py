"""Four kinds of real text, found in the Python installation that runs this.

Every document goes to one of three parts for good: what the base model is made of, what a tenant
trains on, and what nobody sees before the last table.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

STDLIB = Path(sysconfig.get_paths()["stdlib"])
PACKAGES = Path(sysconfig.get_paths()["purelib"])
MAX_BYTES = 1_500_000
"""Of one kind."""
PIECE_LINES = 40
SHARES = {"base": 0.7, "train": 0.2, "held_out": 0.1}


@dataclass(frozen=True)
class Text:
    """Pieces of one kind of text, by what they are for."""

    base: tuple[str, ...]
    train: tuple[str, ...]
    held_out: tuple[str, ...]


@cache
def text_of(kind: str) -> Text:
    """Read one kind of text and deal its pieces out, the same way each time."""
    pieces = list(dict.fromkeys(_pieces(KINDS[kind]())))
    random.Random(kind).shuffle(pieces)
    base, train = int(0.7 * len(pieces)), int(0.9 * len(pieces))
    return Text(tuple(pieces[:base]), tuple(pieces[base:train]), tuple(pieces[train:]))


def _pieces(documents: Iterable[str]) -> Iterable[str]:
    """Cut documents into pieces of some lines, up to `MAX_BYTES` in all.

    Licences, above all, repeat one another; a piece that is there already is dropped by the caller.
    """
    left = MAX_BYTES
    for document in documents:
        lines = document.splitlines()
        for start in range(0, len(lines), PIECE_LINES):
            piece = "\n".join(lines[start : start + PIECE_LINES]).strip()
            if left > 0 and len(piece) > 400:
                left -= len(piece)
                yield piece


def _code() -> Iterable[str]:
    return (_read(path) for path in sorted(STDLIB.glob("*.py")))


def _prose() -> Iterable[str]:
    return (topics[name] for name in sorted(topics))


def _headers() -> Iterable[str]:
    return (_read(path) for path in sorted((PACKAGES / "torch" / "include" / "c10").rglob("*.h")))


def _licences() -> Iterable[str]:
    files = (path for path in sorted(PACKAGES.glob("*.dist-info/**/*")) if path.is_file())
    return (_read(path) for path in files if path.name.upper().startswith(("LICEN", "COPYING")))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


KINDS: Mapping[str, Callable[[], Iterable[str]]] = {
    "Python code": _code,
    "reference prose": _prose,
    "C++ headers": _headers,
    "licences": _licences,
}
