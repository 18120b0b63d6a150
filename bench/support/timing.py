"""Timing of work in alternating rounds: wall time, CPU time, and figures over the rounds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

Work = Callable[[], object]
Name = TypeVar("Name")
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Took:
    """Wall time and CPU time of this process, in seconds."""

    wall_s: float
    cpu_s: float

    def fastest(self, other: Took) -> Took:
        """Return the smaller of each time."""
        return Took(min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))


def turns(ways: Sequence[Name], rounds: int, until: float = math.inf) -> Iterator[Name]:
    """Yield every way once in each round; each round starts with the next way.

    After `until` (of `time.monotonic`) no further round starts, but there is always one.
    """
    for number in range(rounds):
        if number and time.monotonic() > until:
            return
        first = number % len(ways)
        yield from (*ways[first:], *ways[:first])


def alternate(
    ways: Mapping[Name, Callable[[], Measured]], rounds: int, until: float = math.inf
) -> dict[Name, list[Measured]]:
    """Call every way once to warm up, then all of them round by round; return the results of the rounds."""
    found: dict[Name, list[Measured]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for name in turns(list(ways), rounds, until):
        found[name].append(ways[name]())
    return found


def fastest(ways: Mapping[Name, Work], device: str, *, rounds: int, until: float = math.inf) -> dict[Name, Took]:
    """Time all ways in alternation; return the minima, which may come from different rounds."""
    timed_ways = {name: partial(measure, work, device) for name, work in ways.items()}
    return {
        name: Took(min(each.wall_s for each in took), min(each.cpu_s for each in took))
        for name, took in alternate(timed_ways, rounds, until).items()
    }


def ratios(ones: Iterable[float], others: Iterable[float]) -> list[float]:
    return sorted(one / other for one, other in zip(ones, others, strict=True))


def median_ratio(ones: Iterable[float], others: Iterable[float]) -> float:
    return statistics.median(ratios(ones, others))


def percentile(values: Iterable[float], share: float, empty: float = 0.0) -> float:
    """Return the percentile of values by nearest rank; `empty` for none."""
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))] if found else empty


def measure(work: Work, device: str = "cpu") -> Took:
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
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
