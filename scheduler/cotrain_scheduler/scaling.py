"""Required number of workers of each pool, for an autoscaler. It starts and stops no worker itself.

`workers_needed` computes the current need, `next_scaling` damps it, and PoolScaling reads the demand
and writes the decision.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import structlog

from cotrain_store.messages.fleet import Bounds, Pauses, Scaling, Span
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.monitoring.fleet import PoolStatus
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.settings import SchedulerSettings

log = structlog.get_logger()

#: Interval between evaluations of a pool's demand.
DECIDE_EVERY_S = 2.0
#: Interval at which an unchanged decision is written again, so that it does not become stale.
WRITE_S = 10.0
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
#: The number of workers increases to the minimum need of this period; the first worker starts at once.
UP_AFTER_S = 30.0
#: The number of workers decreases to the maximum need of this period.
DOWN_AFTER_S = 300.0
#: The need is recorded as its minimum and maximum in spans of this length.
SPAN_S = 10.0

NOTHING: Mapping[WorkerId, int] = MappingProxyType({})


@dataclass(frozen=True)
class Demand:
    """Unpaused work of a pool, and its workers' rates."""

    tokens: int = 0  # tokens of training requests that are accepted and not run
    growth: float = 0.0  # recent growth of `tokens` per second; below 0 it shrinks
    runs: int = 0  # runnable runs and open steps: the maximum number of workers with training to do
    samples: int = 0  # sample requests that wait or run
    rates: tuple[float, ...] = ()  # tokens per second of each serving worker
    measured: float = 0.0
    """Tokens per second of the worker that started last, even if it is no longer present."""
    busy: float = 0.0
    """Sum of the workers' computing in the last minute: 2.0 is two fully busy workers."""


def demand_of(status: PoolStatus, pauses: Pauses, paused_runs: int = 0) -> Demand:
    """Return the demand of a pool; `paused_runs` of its ready runs are paused."""
    queues = [queue for queue in status.queues if queue.tenant not in pauses.tenants]
    serving = [worker for worker in status.workers if not worker.is_handing_over]
    return Demand(
        tokens=sum(queue.tokens for queue in queues),
        runs=max(0, status.ready_runs - paused_runs) + status.open_cycles,
        samples=sum(queue.samples_waiting + queue.samples_running for queue in queues),
        rates=tuple(worker.tokens_per_s for worker in serving),
        measured=status.record.tokens_per_s,
        busy=sum(min(1.0, worker.busy) for worker in serving),
    )


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
        """Record the current backlog; return its growth over GROWTH_OVER_S, or since the first record, in tokens/s."""
        if self._seen and now <= self._seen[-1][0]:
            self._seen.clear()
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= GROWTH_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (tokens - before) / (now - since) if now > since else 0.0


def first_scaling(workers: int, now: float, bounds: Bounds) -> Scaling:
    """Return the initial decision: the current workers, as if they had had work until now."""
    return Scaling(bounds.within(workers), now, now, bounds)


def next_scaling(
    before: Scaling, needed: int, now: float, bounds: Bounds, waiting_tokens: Mapping[WorkerId, int] = NOTHING
) -> Scaling:
    """Return the next decision, from the current need. It is damped, so that an autoscaler does not oscillate.

    If the clock was set back, the periods start again.
    """
    spans = _recorded(() if now < before.at else before.spans, needed, now)
    busy_at = now if needed else min(before.busy_at, now)
    wanted = max(before.wanted, min(needed, 1))
    if _covers(spans, now, UP_AFTER_S):
        lately = [span.least for span in spans if span.start + SPAN_S > now - UP_AFTER_S]
        wanted = max(wanted, min(lately))
    if _covers(spans, now, DOWN_AFTER_S):
        wanted = min(wanted, max(span.most for span in spans))
    if wanted == 0 < before.wanted and now - busy_at < bounds.idle_s:
        wanted = 1  # the last worker stays for `idle_s`
    return Scaling(bounds.within(wanted), now, busy_at, bounds, spans, dict(waiting_tokens))


def differs(new: Scaling, old: Scaling, after_s: float) -> bool:
    """Return True if the decision changed or the old record is older than `after_s`."""
    decision = new.wanted, new.bounds, new.waiting_tokens
    written = old.wanted, old.bounds, old.waiting_tokens
    return decision != written or not 0 <= new.at - old.at < after_s


def _recorded(spans: tuple[Span, ...], needed: int, now: float) -> tuple[Span, ...]:
    kept = tuple(span for span in spans if span.start + SPAN_S > now - DOWN_AFTER_S)
    if kept and now < kept[-1].start + SPAN_S:
        last = kept[-1]
        grown = Span(last.start, min(last.least, needed), max(last.most, needed))
        return (*kept[:-1], grown)
    return (*kept, Span(now, needed, needed))


def _covers(spans: tuple[Span, ...], now: float, duration_s: float) -> bool:
    """Return True if the spans cover the last `duration_s`, to within one span."""
    return now - spans[0].start >= duration_s - SPAN_S


class PoolScaling:
    """Scaling decisions for one pool, by the leading scheduler."""

    def __init__(self, dispatch: Dispatch, pool: PoolId, settings: SchedulerSettings) -> None:
        self._dispatch = dispatch
        self._pool = pool
        self._bounds = Bounds(settings.workers_min, settings.workers_max, settings.idle_after_s)
        self._growth = Growth()
        self._decided: Scaling | None = None
        self._written: Scaling | None = None

    def forget(self) -> None:
        """Drop the last decision and read the stored one, because another scheduler may have led."""
        self._decided = None

    async def decide(self, waiting_tokens: Mapping[WorkerId, int], pauses: Pauses) -> None:
        """Decide the number of workers, and write the decision if it changed or its record is old. Raises Fenced: a
        newer scheduler leads.
        """
        now = time.time()
        status = await self._dispatch.status(self._pool)
        paused_runs = await self._dispatch.paused_runs(self._pool, pauses)
        demand = demand_of(status, pauses, paused_runs)
        before = self._decided or status.scaling
        before = before or first_scaling(len(demand.rates), now, self._bounds)
        growth = self._growth.per_second(demand.tokens, now)
        needed = workers_needed(replace(demand, growth=growth))
        decided = next_scaling(before, needed, now, self._bounds, waiting_tokens)
        if decided.wanted != before.wanted:
            log.info("workers_wanted", pool=self._pool, wanted=decided.wanted, needed=needed)
        self._decided = decided
        if not self._written or differs(decided, self._written, WRITE_S):
            await self._dispatch.write_scaling(self._pool, decided)
            self._written = decided
