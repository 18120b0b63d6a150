"""A host whose time of day jumps, and whose files look old, for all processes of a nursery.

The processes start with a preloaded shim (`shims/clock.c`) that shifts the time of day; the
monotonic clocks are unchanged, as on a real host.
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
from tests.faults.invariants import PLACES
from tests.faults.orders import Nursery
from tests.faults.trial import Disturb
from tests.support.waiting import until
from tests.warm.sources import SOURCES

SOURCE = Path(__file__).parent / "shims" / "clock.c"
TWO_DAYS_S = 48 * 3600.0
LOOK_S = 0.02


class HostClock:
    """Time of day of all processes that start with `environment`."""

    def __init__(self, file: Path, library: Path) -> None:
        self._file = file
        self.set_ahead(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIM": str(file)}

    def set_ahead(self, hours: float) -> None:
        """Set it this many hours ahead of the real time, or behind if negative."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", int(hours * 3600)))


class Elsewhen(Nursery):
    """A nursery whose children have their own time of day."""

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
    """Set the time of day to each of `hours`, after every `every` committed cycles."""

    async def disturb(host: Host) -> None:
        for number, ahead in enumerate(hours, start=1):
            await until(lambda: host.count("worker.after_commit") >= number * every, LOOK_S)  # noqa: B023  # awaited here
            clock.set_ahead(ahead)

    return disturb


def age_files(folder: Path) -> None:
    """Set the modification times of all stored files back by two days."""
    then = time.time() - TWO_DAYS_S
    for place, pattern in PLACES.items():
        for path in (folder / place).glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # a sweep may have removed it
                os.utime(path, (then, then))
