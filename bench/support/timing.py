"""Timing of work: wall time and this process's CPU time, in alternating rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Work = Callable[[], object]

Name = TypeVar("Name")


@dataclass(frozen=True)
class Took:
    """Smallest times of some rounds, in seconds; the minima may come from different rounds."""

    wall_s: float
    cpu_s: float

    def fastest(self, other: Took) -> Took:
        """Return the smaller of each time."""
        return Took(min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))


def alternate(
    ways: Mapping[Name, Work], device: str, *, rounds: int, until: float
) -> dict[Name, Took]:
    """Run every way once to warm up, then all of them round by round; return the minima.

    After `until` (of `time.monotonic`) no further round starts, but one round always runs.
    """
    for work in ways.values():
        timed(work, device)
    best: dict[Name, Took] = {}
    for at in range(rounds):
        if at and time.monotonic() > until:
            break
        for name, work in ways.items():
            took = measure(work, device)
            best[name] = took.fastest(best.get(name, took))
    return best


def measure(work: Work, device: str) -> Took:
    """Return the times of one call."""
    cpu = time.process_time()
    wall = timed(work, device)
    return Took(wall, time.process_time() - cpu)


def timed(work: Work, device: str) -> float:
    """Return the wall time of one call in seconds, including its pending work on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
