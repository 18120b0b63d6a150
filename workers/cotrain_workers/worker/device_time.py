"""What the device did with its time: training, the optimizer, sampling, or nothing. All of it adds up to the time there was.

Time is booked in laps: what passed since the last one is one kind's. What was booked never changes, so that a
reader (the heartbeat's thread) sees numbers that only grow, late by one lap at most.
"""

from __future__ import annotations

import time
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

from cotrain_workers.engine.ops import CyclePart

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_workers.engine.ops import CycleOutput

#: Of how long the shares are that a heartbeat shows.
WINDOW_S = 60.0
#: A visit of the decoder that was shorter had nothing to decode.
_VISIT_S = 0.001


class Phase(StrEnum):
    """What the device does."""

    #: Forward and backward passes; replays, too.
    TRAIN = "train"
    #: Optimizer steps, and copies of saves.
    OPTIM = "optim"
    SAMPLE = "sample"
    #: It waits: for requests, for bodies to be read, for a commit.
    IDLE = "idle"


class DeviceTime:
    """Books the time of one device. For the worker's own thread; `seconds` is for any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lap_at = clock()
        self._booked = dict.fromkeys(Phase, 0.0)
        self._optim_s = 0.0

    def lap(self, phase: Phase) -> float:
        """Book the time since the last lap, and return it."""
        now = self._clock()
        passed, self._lap_at = now - self._lap_at, now
        if phase is Phase.TRAIN and self._optim_s:
            optim = min(self._optim_s, passed)
            self._optim_s -= optim
            self._booked[Phase.OPTIM] += optim
            self._booked[Phase.TRAIN] += passed - optim
        else:
            self._booked[phase] += passed
        return passed

    def optimized(self, seconds: float) -> None:
        """Say that of the training that is booked next, so much was the optimizer's: it is known at the end."""
        self._optim_s += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Return what was booked since the start, by kind."""
        return {phase.value: seconds for phase, seconds in self._booked.items()}


class CycleTimes:
    """When the parts of one cycle began and ended, by the wall clock; the device's time is booked part by part."""

    def __init__(self, device_time: DeviceTime) -> None:
        """Begin a cycle: the device was idle before."""
        self._device_time = device_time
        device_time.lap(Phase.IDLE)
        self.began = self._last = time.time()
        self._noted: list[CyclePart] = []
        self._visits: list[tuple[float, float]] = []

    def note(self, name: str, phase: Phase = Phase.IDLE) -> None:
        """End a part of this name, which began where the last one ended, and say what the device did."""
        self._device_time.lap(phase)
        now = time.time()
        self._noted.append(CyclePart(name, self._last, now))
        self._last = now

    def visited(self, act: Callable[[], None]) -> Callable[[], None]:
        """Note when this worked, too, which runs at yield points."""

        def noted() -> None:
            began = time.time()
            act()
            ended = time.time()
            if ended - began >= _VISIT_S:
                self._visits = [(self._visits or [(began, ended)])[0], (began, ended)]

        return noted

    def parts(self, cost: CycleOutput | None) -> list[CyclePart]:
        """Give the parts; in place of the run what it consists of, where that is known.

        Sampling lies between its first and its last visit, and works in a part of that time.
        """
        visits = self._visits
        sampling = [CyclePart("sampling", visits[0][0], visits[-1][1])] if visits else []
        if cost is None:
            return [*self._noted, *sampling]
        known = [part for part in self._noted if part.name != "run"]
        return [*known, *cost.parts, *sampling]


class Duty:
    """What part of the last minute each kind took. For one thread."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def shares(self, seconds: dict[str, float], now: float) -> dict[str, float]:
        """Note what was booked until now; return shares that add up to 1, or to 0 before anything was booked."""
        self._seen.append((now, seconds))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        before = self._seen[0][1] if len(self._seen) > 1 else dict.fromkeys(seconds, 0.0)
        taken = {phase: seconds[phase] - before[phase] for phase in seconds}
        total = sum(taken.values())
        return {phase: took / total if total else 0.0 for phase, took in taken.items()}
