"""How much waits in a pool, as time, and how many workers its work needs at this moment. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: What waits shall be done with within this time.
WANTED_WITHIN_S = 60.0
#: Where it is going to be done with within this time, the workers there are will do.
OVER_WITHIN_S = 600.0
#: What waits is compared with what waited so long ago.
GROWTH_OVER_S = 30.0
#: Workers stay that are busy: so much of the last minute each of those that stay may have computed.
BUSY_SHARE = 0.8
#: A worker at rest computes less than this part of a minute.
AT_REST = 0.01


@dataclass(frozen=True)
class Demand:
    """What a pool has to do, of those that are not held back, and what it does it with."""

    tokens: int = 0
    """Of training requests that are accepted and not run."""
    growth: float = 0.0
    """Tokens by which that grew lately, per second; below 0 it shrinks."""
    runs: int = 0
    """Runs with a request that can be run, and steps at work: no more workers than these have training to do."""
    samples: int = 0
    """Sample requests that wait or run."""
    rates: tuple[float, ...] = ()
    """Tokens per second of each worker that serves."""
    measured: float = 0.0
    """The same of the worker that started last, wherever it is now."""
    busy: float = 0.0
    """What the workers computed of the last minute, added up: 2.0 are two workers without a rest."""


def backlog_seconds(tokens: int, rates: Sequence[float], measured: float) -> float:
    """Return the time that queued tokens take; `rates` are of live workers, in tokens/s.

    Without a live worker, that of one at the rate `measured` last.
    """
    rate = sum(rates) or measured
    return tokens / rate if rate > 0 else 0.0


def workers_needed(demand: Demand) -> int:
    """Count the workers, as fast as those there are, that this moment's work needs: the formula of docs/metrics.md.

    As many as end what waits within WANTED_WITHIN_S. At most twice those there are, and none more where what waits
    shrinks so that it is over within OVER_WITHIN_S: while workers start it grows, and is no measure of the load then.
    No fewer than what the last minute's computing takes at BUSY_SHARE, which adds none to those there are. One at
    least while anything can be run.
    """
    rates = demand.rates
    rate = sum(rates) / len(rates) if rates else demand.measured
    waiting = math.ceil(demand.tokens / (rate * WANTED_WITHIN_S)) if rate > 0 else 0
    at_once = demand.runs + demand.samples
    computing = math.ceil(demand.busy / BUSY_SHARE - AT_REST)
    is_ending = demand.tokens < -demand.growth * OVER_WITHIN_S
    ending = min(waiting, at_once, len(rates) if is_ending else 2 * len(rates))
    return max(ending, min(computing, len(rates)), min(at_once, 1))


class Growth:
    """By how much what waits in one pool grows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def per_second(self, tokens: int, now: float) -> float:
        """Note what waits now; return its growth since GROWTH_OVER_S ago, or since it was noted first, in tokens/s."""
        if self._seen and now <= self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= GROWTH_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (tokens - before) / (now - since) if now > since else 0.0


def computed(duty: Mapping[str, float]) -> float:
    """Say what part of the last minute a worker computed, sampling included, by its heartbeat."""
    return sum(share for phase, share in duty.items() if phase != "idle")
