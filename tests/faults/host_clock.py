"""A host whose time is set, and whose files look old: for all processes of a nursery at once.

They are started below a preloaded shim (`shims/clock.c`) that moves the time of day; the monotonic clocks
stay as they are, as on a real host.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from tests.faults.host import Host
from tests.faults.leftovers import PLACES
from tests.faults.orders import Nursery
from tests.faults.trial import Disturb
from tests.support.waiting import until
from tests.warm.sources import SOURCES

SOURCE = Path(__file__).parent / "shims" / "clock.c"
TWO_DAYS_S = 48 * 3600.0
LOOK_S = 0.02


class HostClock:
    """The time of day of all processes that start with `environment`."""

    def __init__(self, file: Path, library: Path) -> None:
        self._file = file
        self.set_ahead(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIM": str(file)}

    def set_ahead(self, hours: float) -> None:
        """Set it so far ahead of what it really is; behind, below 0."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", int(hours * 3600)))


class Elsewhen(Nursery):
    """A nursery whose children have a time of day of their own."""

    def __init__(self, model: Path, clock: HostClock, sources: Sequence[str] = ()) -> None:
        super().__init__(model, sources or SOURCES)
        self.clock = clock

    @override
    async def __aenter__(self) -> Elsewhen:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.clock.environment.items():
                patch.setenv(name, value)
            await super().__aenter__()
        return self


def jumping(clock: HostClock, hours: Sequence[float], every: int) -> Disturb:
    """Set the time of day to each of these, whenever so many more cycles have been committed."""

    async def disturb(host: Host) -> None:
        for number, ahead in enumerate(hours, start=1):
            await until(lambda: host.count("worker.after_commit") >= number * every, LOOK_S)  # noqa: B023  # awaited here
            clock.set_ahead(ahead)

    return disturb


def age_files(folder: Path) -> None:
    """Date all that the server keeps back by two days."""
    then = time.time() - TWO_DAYS_S
    for place, pattern in PLACES.items():
        for path in (folder / place).glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # a sweep was faster
                os.utime(path, (then, then))
