"""Start time and time limit of the next cycle of one worker. Pure; times in seconds, `now` is an argument."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cotrain_store.messages.ids import RunId

#: Minimum time that an eager cycle waits for the runs of the last one.
GATHER_S = 0.005
#: Maximum wait for the other runs of the last cycle, as a share of its duration.
GATHER_SHARE = 0.1
#: Wait at most this multiple of the recent return time.
PATIENCE = 3.0
#: Decay factor of the return time per cycle without a return.
FADES = 0.5
#: Share of the clock period that an eager cycle may take. A request that arrives when a cycle has just started waits for
#: the rest of it, for the gather window and for all of the next: 2.1 cycles. The rest of the period is a reserve for
#: unknowns: a micro-batch that runs past the limit, and a wrong throughput estimate.
EAGER_SHARE = 0.4


@dataclass(frozen=True)
class LastCycle:
    """Runs, duration and end of a worker's previous cycle."""

    runs: frozenset[RunId] = frozenset()
    duration_s: float = 0.0
    ended_at: float = 0.0


@dataclass
class ReturnTimes:
    """Times between a response and the next request of its run, to decide how long to wait.

    Loops with two steps in flight return at once. Loops that have ended, or are sampling, do not return:
    waiting a tenth of each cycle for them would cost all other runs that tenth.
    """

    latest_s: float = 0.0  # longest recent return time within the gather window

    def note(self, delays_s: Iterable[float], limit_s: float) -> None:
        """Record the return times of the runs that came back since the last cycle.

        A return later than the window of a cycle of `limit_s`, the longest possible cycle, is ignored.
        """
        in_time = [delay_s for delay_s in delays_s if delay_s <= GATHER_SHARE * limit_s]
        self.latest_s = max([FADES * self.latest_s, *in_time])


def eager_start(last: LastCycle, now: float, gather_s: float, returns: ReturnTimes, *, are_back: bool) -> float:
    """Return the start time of an eager cycle; `are_back` means that all runs of the last cycle wait again.

    Then it starts at once, so a single run never waits. Otherwise, the runs just answered get at least a few
    milliseconds to send their next request. That time grows with the recent return time, up to a tenth of
    the last cycle. A cycle without them would make them wait for a whole one.
    """
    if are_back:
        return now
    window_s = min(GATHER_SHARE * last.duration_s, PATIENCE * returns.latest_s)
    return max(now, last.ended_at + max(gather_s, window_s))


def cycle_limit_s(period_s: float, *, begins_at_once: bool) -> float:
    """Return the time limit of a cycle, so that a request waiting for an eager cycle is answered within a period.

    Cycles of the metronome start one period apart, whatever they contain, and may fill it.
    """
    return EAGER_SHARE * period_s if begins_at_once else period_s


def period_number(now: float, period_s: float) -> int:
    """Return the number of the metronome's period; a cycle starts only at a multiple of the period."""
    return math.floor(now / period_s)
