"""Which runs go to another worker, and when: in simulated time, on loads as heartbeats and queues show them."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cotrain_scheduler.moving import (
    DIFFERENCE_S,
    LASTS_S,
    REST_S,
    Balance,
    Load,
    levelled,
    load_of,
)
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.oplog.moves import QUIET_S

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
RUNS = [RunId(f"run{number}") for number in range(8)]


def load(worker: WorkerId, seconds: float, **tokens: float) -> Load:
    return Load(worker, seconds, seconds, {RunId(run): each for run, each in tokens.items()})


def test_a_load_is_the_last_minutes_work_and_what_waits() -> None:
    beat = WorkerHeartbeat(
        W0, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"train": 0.4, "sample": 0.1, "idle": 0.5}
    )
    found = load_of(beat, 250.0, {})
    assert (found.seconds, found.training_s) == (30.0 + 2.5, 24.0 + 2.5)


def test_runs_of_a_worker_that_samples_are_no_heavier_for_that() -> None:
    """What it samples stays with it: only their training goes with the runs that go."""
    asked = {RunId("a"): 1.0, RunId("b"): 1.0}
    samples = WorkerHeartbeat(
        W0, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"train": 0.1, "sample": 0.8, "idle": 0.1}
    )
    trains = WorkerHeartbeat(
        W1, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"train": 0.5, "idle": 0.5}
    )
    # Were sampling theirs, each run was 27 s of 54, and none fitted half of the difference of 24 s.
    found = levelled([load_of(samples, 0.0, asked), load_of(trains, 0.0, {})], frozenset())
    assert found == [("b", W1)]
    # And runs that trained nothing lately weigh nothing, however much is sampled.
    heavy = WorkerHeartbeat(W0, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"sample": 1.0})
    loads = [load_of(heavy, 0.0, asked), load_of(trains, 0.0, {})]
    assert levelled(loads, frozenset()) == []


def test_a_difference_has_to_last() -> None:
    balance, loads = Balance(), [load(W0, 60.0, a=1, b=1), load(W1, 0.0)]
    assert balance.moves(loads, 0.0) == []
    assert balance.moves(loads, LASTS_S - 1) == []
    assert balance.moves([load(W0, DIFFERENCE_S - 1, a=1, b=1), load(W1, 0.0)], LASTS_S) == []
    assert balance.moves(loads, LASTS_S + 1) == []
    assert balance.moves(loads, 2 * LASTS_S + 1) == [("b", W1)]
    assert balance.moves(loads, 2 * LASTS_S + 2) == []
    assert balance.moves(loads, 2 * LASTS_S + REST_S) == []


def test_a_run_that_is_all_of_a_workers_work_stays() -> None:
    """The other worker would be what this one is now."""
    assert levelled([load(W0, 60.0, only=9), load(W1, 0.0)], frozenset()) == []


def test_the_largest_that_fits_goes_first_and_runs_at_rest_stay() -> None:
    loads = [load(W0, 60.0, large=40, middle=15, small=5, none=0), load(W1, 0.0)]
    assert levelled(loads, frozenset()) == [("middle", W1), ("small", W1)]
    assert levelled(loads, {RunId("middle")}) == [("small", W1)]


@given(
    st.lists(st.floats(0, 120), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1e6)), max_size=20),
)
def test_moves_bring_workers_nearer_and_never_swap_them(
    seconds: list[float], runs: list[tuple[int, float]]
) -> None:
    tokens: defaultdict[int, dict[RunId, float]] = defaultdict(dict)
    for number, (at, asked) in enumerate(runs):
        tokens[at % len(seconds)][RunId(f"run{number}")] = asked
    loads = [Load(WorkerId(f"w{at}"), each, each, tokens[at]) for at, each in enumerate(seconds)]
    found = levelled(loads, frozenset())
    assert len({run for run, _ in found}) == len(found)
    after = {each.worker: each.seconds for each in loads}
    for run, to in found:
        (source,) = [each for each in loads if run in each.tokens_of]
        part = source.seconds * source.tokens_of[run] / sum(source.tokens_of.values())
        after[source.worker] -= part
        after[to] += part
    before = [each.seconds for each in loads]
    assert max(after.values()) <= max(before) + 1e-6
    assert min(after.values()) >= min(before) - 1e-6


def simulated(
    demand: dict[RunId, float], workers: list[WorkerId], seconds: int
) -> tuple[list[tuple[int, RunId]], dict[RunId, WorkerId]]:
    """Let runs ask for so many seconds of work per minute, all at w0 at first; returns the moves, and who is where."""
    balance, home = Balance(), dict.fromkeys(demand, W0)
    moved: dict[RunId, float] = {}
    moves = []
    for now in range(seconds):
        loads = [
            Load(
                worker,
                min(60.0, sum(demand[run] for run in demand if home[run] == worker)),
                min(60.0, sum(demand[run] for run in demand if home[run] == worker)),
                {run: demand[run] for run in demand if home[run] == worker},
            )
            for worker in workers
        ]
        resting = {run for run, at in moved.items() if now - at < QUIET_S}
        for run, to in balance.moves(loads, float(now), resting):
            home[run], moved[run] = to, now
            moves.append((now, run))
    return moves, home


def test_of_eight_runs_on_one_worker_some_go_to_a_second_within_a_minute_and_none_goes_twice() -> (
    None
):
    moves, home = simulated(dict.fromkeys(RUNS, 30.0), [W0, W1], 600)
    assert moves
    assert max(now for now, _ in moves) < 60
    assert len({run for _, run in moves}) == len(moves)
    assert set(home.values()) == {W0, W1}


@given(st.lists(st.floats(0, 60), min_size=1, max_size=16), st.integers(2, 4))
def test_no_run_moves_twice_in_ten_minutes_and_it_ends(demands: list[float], count: int) -> None:
    demand = {RunId(f"run{number}"): each for number, each in enumerate(demands)}
    workers = [WorkerId(f"w{number}") for number in range(count)]
    moves, _ = simulated(demand, workers, 1500)
    for run in demand:
        times = [now for now, each in moves if each == run]
        assert all(later - now >= QUIET_S for now, later in pairwise(times))
