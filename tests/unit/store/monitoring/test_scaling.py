"""Autoscaler that follows the requested workers, in simulated time. Workers take minutes to start,
and the backlog grows in the meantime.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from cotrain_store.messages.fleet import DOWN_AFTER_S, Bounds, first_scaling
from cotrain_store.monitoring.backlog import Demand, Growth, workers_needed

RATE = 1_000.0
EVERY_S = 2.0
STARTS_S = 180.0
"""Time from the request of a worker to its first step: a node, a pod, the base model."""
MINUTE = int(60 / EVERY_S)


def followed(load: list[tuple[float, float]], runs: int = 20) -> list[int]:
    """Simulate phases of (seconds, offered load in workers). Return the requested workers every 2
    s.
    """
    now, tokens, there = 0.0, 0.0, 0
    coming: list[float] = []
    scaling = first_scaling(0, now, Bounds(least=0))
    busy: list[float] = []
    growth = Growth()
    found = []
    for for_s, offered in load:
        for _ in range(int(for_s / EVERY_S)):
            now += EVERY_S
            there += sum(at <= now for at in coming)
            coming = [at for at in coming if at > now]
            tokens += offered * RATE * EVERY_S
            done = min(tokens, there * RATE * EVERY_S)
            tokens -= done
            busy = [*busy[1 - MINUTE :], done / (RATE * EVERY_S)]
            demand = Demand(
                tokens=int(tokens),
                growth=growth.per_second(int(tokens), now),
                runs=runs if offered or tokens else 0,
                rates=(RATE,) * there,
                measured=RATE,
                busy=min(float(there), sum(busy) / MINUTE),
            )
            scaling = scaling.after(workers_needed(demand), now, Bounds(least=0))
            coming += [now + STARTS_S] * (scaling.wanted - there - len(coming))
            while scaling.wanted < there + len(coming):
                if coming:
                    coming.pop()
                else:
                    there -= 1
            found.append(scaling.wanted)
    return found


def changes(found: list[int]) -> list[tuple[int, int]]:
    return [(before, after) for before, after in pairwise(found) if before != after]


@pytest.mark.parametrize("load", [0.3, 0.7, 1.5, 2.5, 4.2])
def test_a_steady_load_ends_with_a_steady_sufficient_number(load: float) -> None:
    found = followed([(4 * 3600.0, load)])
    turns = [after > before for before, after in changes(found)]
    # Up while workers start, then once down to the needed number, never up again.
    assert turns == sorted(turns, reverse=True)
    assert len(set(found[-int(3600 / EVERY_S) :])) == 1
    assert load <= found[-1] <= load / 0.8 + 1
    assert max(found) <= 2 * load + 2


def test_a_load_alternating_every_minute_changes_nothing_for_hours() -> None:
    found = followed([(60.0, 1.6), (60.0, 0.0)] * 120)
    settled = found[-int(3600 / EVERY_S) :]
    assert len(set(settled)) == 1
    assert settled[0] <= 2


def test_a_day_with_one_busy_period_starts_and_ends_without_workers() -> None:
    found = followed([(600.0, 0.0), (7200.0, 3.0), (3600.0, 0.0)])
    assert (found[0], found[-1]) == (0, 0)
    assert max(found) <= 8
    last = max(i for i, each in enumerate(found) if each > 1)
    assert last * EVERY_S <= 600 + 7200 + 2 * DOWN_AFTER_S
