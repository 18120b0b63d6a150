"""Backlog of a pool as time, and the number of workers that its current work needs. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Target time to drain the backlog, in s.
WANTED_WITHIN_S = 60.0
#: No workers are added if the backlog will be drained within this time, in s.
OVER_WITHIN_S = 600.0
#: Period over which the growth of the backlog is measured, in s.
GROWTH_OVER_S = 30.0
#: Maximum share of the last minute that each remaining worker may have computed.
BUSY_SHARE = 0.8
#: An idle worker computes less than this part of a minute.
AT_REST = 0.01


@dataclass(frozen=True)
class Demand:
    """Unpaused work of a pool, and its workers' rates."""

    tokens: int = 0
    """Tokens of training requests that are accepted and not run."""
    growth: float = 0.0
    """Recent growth of `tokens` per second; below 0 it shrinks."""
    runs: int = 0
    """Runnable runs and open steps: the maximum number of workers with training to do."""
    samples: int = 0
    """Sample requests that wait or run."""
    rates: tuple[float, ...] = ()
    """Tokens per second of each serving worker."""
    measured: float = 0.0
    """Tokens per second of the worker that started last, even if it is no longer present."""
    busy: float = 0.0
    """Sum of the workers' computing in the last minute: 2.0 is two fully busy workers."""


def backlog_seconds(tokens: int, rates: Sequence[float], measured: float) -> float:
    """Return the time that queued tokens take; `rates` are of live workers, in tokens/s.

    Without a live worker, assume one at the rate `measured` last.
    """
    rate = sum(rates) or measured
    return tokens / rate if rate > 0 else 0.0


def workers_needed(demand: Demand) -> int:
    """Return the number of workers of the current speed that the current work needs: the formula of
    docs/reference/metrics.md.

    * Enough to drain the backlog within WANTED_WITHIN_S, but at most twice the current workers.
    * No additional workers if the backlog shrinks and will be drained within OVER_WITHIN_S. While
      workers start, the backlog grows and does not measure the load.
    * At least the number that the last minute's computing takes at BUSY_SHARE, up to the current
      workers.
    * At least one while anything can run.
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
    """Growth of the backlog of one pool."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def per_second(self, tokens: int, now: float) -> float:
        """Record the current backlog; return its growth over GROWTH_OVER_S, or since the first
        record, in tokens/s.
        """
        if self._seen and now <= self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= GROWTH_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (tokens - before) / (now - since) if now > since else 0.0


def computed(duty: Mapping[str, float]) -> float:
    """Return the share of the last minute that a worker computed, sampling included, from its
    heartbeat.
    """
    return sum(share for phase, share in duty.items() if phase != "idle")
