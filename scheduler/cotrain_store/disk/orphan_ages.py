"""How long files have been unwanted: measured by what one process saw of them, by no clock that can be set.

A host's time of day jumps: it is set, the host sleeps, a virtual machine goes on from an image. So a
file's date says nothing of its age.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    #: What changes when a file, or one in a folder, is written, replaced or touched: inode, size, date.
    _Mark: TypeAlias = tuple[tuple[int, int, int], ...]

#: A file that nothing refers to may be one that a process is about to refer to; not after so long.
ORPHAN_AGE_S = 600.0


class Unwanted:
    """Since when one process has seen files unwanted. Losing it only lets them stay for longer."""

    def __init__(self, age_s: float = ORPHAN_AGE_S) -> None:
        self._age_s = age_s
        self._since: dict[Path, tuple[_Mark, float]] = {}

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was unwanted at the last look."""
        return not self._since

    def old(self, unwanted: Iterable[Path], now: float) -> list[Path]:
        """Note all that is unwanted now; list what was at every look for the age, unchanged.

        `now` is of a clock that is never set, in s (`time.monotonic`).
        """
        before, self._since = self._since, {}
        for path in unwanted:
            mark = _mark(path)
            if mark is None:
                continue
            its, since = before.get(path, (mark, now))
            self._since[path] = mark, since if its == mark else now
        return [path for path, (_, since) in self._since.items() if now - since >= self._age_s]


def _mark(path: Path) -> _Mark | None:
    try:
        parts = [path, *(sorted(path.iterdir()) if path.is_dir() else ())]
        facts = [part.stat() for part in parts]
    except FileNotFoundError:  # another process has just removed it
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in facts)
