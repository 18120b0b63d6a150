"""Age of unreferenced files, measured by the observations of one process with a monotonic clock.

A host's time of day jumps: it is set, the host sleeps, a virtual machine resumes from an image. The
date of a file or of an object in a store therefore does not show its age.
"""

from collections.abc import Mapping

#: Age in s after which an unreferenced file may be deleted. A younger one may get a reference soon.
ORPHAN_AGE_S = 600.0


class Unwanted:
    """Unreferenced files and the time since when one process has seen them so. Its loss only delays
    their deletion.
    """

    def __init__(self, age_s: float = ORPHAN_AGE_S) -> None:
        self._age_s = age_s
        self._since: dict[str, tuple[str, float]] = {}

    @property
    def is_empty(self) -> bool:
        """True if no file was unreferenced at the last check."""
        return not self._since

    def old(self, unwanted: Mapping[str, str], now: float) -> list[str]:
        """Record all files unreferenced now; return those that were unreferenced and unchanged for
        the age.

        The mark of a file changes when it is written, replaced or touched (`Blob.mark`). `now` is
        from a monotonic clock, in s (`time.monotonic`).
        """
        before, self._since = self._since, {}
        for key, mark in unwanted.items():
            its, since = before.get(key, (mark, now))
            self._since[key] = mark, since if its == mark else now
        return [key for key, (_, since) in self._since.items() if now - since >= self._age_s]
