"""How long files have been unwanted: measured by what one process saw of them, by no clock that can be set.

A host's time of day jumps: it is set, the host sleeps, a virtual machine goes on from an image. So a
file's date says nothing of its age, and neither does that of an object in a store.
"""

from __future__ import annotations

from collections.abc import Mapping

#: A file that nothing refers to may be one that a process is about to refer to; not after so long.
ORPHAN_AGE_S = 600.0


class Unwanted:
    """Since when one process has seen files unwanted. Losing it only lets them stay for longer."""

    def __init__(self, age_s: float = ORPHAN_AGE_S) -> None:
        self._age_s = age_s
        self._since: dict[str, tuple[str, float]] = {}

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was unwanted at the last look."""
        return not self._since

    def old(self, unwanted: Mapping[str, str], now: float) -> list[str]:
        """Note all that is unwanted now, by its key; list what was at every look for the age, unchanged.

        Each has a mark that changes when it is written, replaced or touched (`Blob.mark`). `now` is of a
        clock that is never set, in s (`time.monotonic`).
        """
        before, self._since = self._since, {}
        for key, mark in unwanted.items():
            its, since = before.get(key, (mark, now))
            self._since[key] = mark, since if its == mark else now
        return [key for key, (_, since) in self._since.items() if now - since >= self._age_s]
