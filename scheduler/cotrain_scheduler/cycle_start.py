"""Decide when the next cycle of one worker may start, and how long it may take. Pure; times in seconds, `now` comes in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cotrain_store.messages.ids import RunId

#: How long an eager cycle waits for the runs of the last one to come back, at least.
GATHER_S = 0.005
#: Waiting for the others of the last cycle may cost this share of what it took.
GATHER_SHARE = 0.1
#: It is waited no longer than so many times what those that came back took of late.
PATIENCE = 3.0
#: To so much of it what they took fades in a cycle without them.
FADES = 0.5
#: Of the clock period, what an eager cycle may take. A request that comes when one has just begun waits for the rest of it,
#: for the gather window and for all of the next: 2.1 cycles. The rest of the period is for what a plan does not
#: know: a micro-batch that goes on when the time is over, and a throughput that was measured otherwise.
EAGER_SHARE = 0.4


@dataclass(frozen=True)
class LastCycle:
    """What a worker's previous cycle looked like: who was in it, how long it took, when it ended."""

    runs: frozenset[RunId] = frozenset()
    duration_s: float = 0.0
    ended_at: float = 0.0


@dataclass
class ReturnTimes:
    """How long after an answer its run sends more: what is worth waiting for.

    Loops with two steps in flight are back at once, and those that are over, or sample now, not at all: to wait a
    tenth of each cycle for them would cost all others that tenth.
    """

    latest_s: float = 0.0
    """Of those that came within the window of a long cycle, the latest of late."""

    def note(self, delays_s: Iterable[float], limit_s: float) -> None:
        """Count who came back since the last cycle, with how long after its answer.

        Who takes longer than the window of a cycle of `limit_s`, the longest there is, is not waited for.
        """
        in_time = [delay_s for delay_s in delays_s if delay_s <= GATHER_SHARE * limit_s]
        self.latest_s = max([FADES * self.latest_s, *in_time])


def eager_start(
    last: LastCycle, now: float, gather_s: float, returns: ReturnTimes, *, are_back: bool
) -> float:
    """Say when an eager cycle starts; `are_back`: all runs of the last cycle wait again.

    Then at once, hence always for a run on its own. Otherwise those just answered get a few
    milliseconds, or as long as others needed of late and at most a tenth of the last cycle, to send their next
    request: a cycle without them would make them wait for a whole one.
    """
    if are_back:
        return now
    window_s = min(GATHER_SHARE * last.duration_s, PATIENCE * returns.latest_s)
    return max(now, last.ended_at + max(gather_s, window_s))


def cycle_limit_s(period_s: float, *, begins_at_once: bool) -> float:
    """Say how long a cycle may take: so that who waits for an eager one has its results within a period.

    On the metronome cycles begin a period apart, whatever they hold, and fill it.
    """
    return EAGER_SHARE * period_s if begins_at_once else period_s


def period_number(now: float, period_s: float) -> int:
    """Number the metronome's periods: a cycle starts on a multiple of the period, or not at all."""
    return math.floor(now / period_s)
