"""Migration of runs to another worker, in simulated time, from the loads of heartbeats and queues."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_scheduler.rebalancing import DIFFERENCE_S, LASTS_S, REST_S, Balance, Load, levelled, load_of
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.oplog.moves import QUIET_S
from tests.support.draws import examples

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
RUNS = [RunId(f"run{number}") for number in range(8)]


def load(worker: WorkerId, seconds: float, **tokens: float) -> Load:
    return Load(worker, seconds, seconds, {RunId(run): each for run, each in tokens.items()})


def test_a_load_is_the_work_of_the_last_minute_plus_the_pending_work() -> None:
    beat = WorkerHeartbeat(W0, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"train": 0.4, "sample": 0.1, "idle": 0.5})
    found = load_of(beat, 250.0, {})
    assert (found.seconds, found.training_s) == (30.0 + 2.5, 24.0 + 2.5)


def test_sampling_does_not_add_to_the_load_of_the_runs_of_a_worker() -> None:
    """Samples of a worker stay on it. Only the training of a run moves with the run."""
    asked = {RunId("a"): 1.0, RunId("b"): 1.0}
    samples = WorkerHeartbeat(
        W0, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"train": 0.1, "sample": 0.8, "idle": 0.1}
    )
    trains = WorkerHeartbeat(W1, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"train": 0.5, "idle": 0.5})
    # If sampling counted as theirs, each run would be 27 s of 54 s, and none would fit half of the difference of 24 s.
    found = levelled([load_of(samples, 0.0, asked), load_of(trains, 0.0, {})], frozenset())
    assert found == [("b", W1)]
    # Runs without recent training have no weight, however much is sampled.
    heavy = WorkerHeartbeat(W0, 1, "serving", "cpu", 100.0, 0, 0, 0.0, duty={"sample": 1.0})
    loads = [load_of(heavy, 0.0, asked), load_of(trains, 0.0, {})]
    assert levelled(loads, frozenset()) == []


def test_a_load_difference_must_persist_before_a_run_moves() -> None:
    balance, loads = Balance(), [load(W0, 60.0, a=1, b=1), load(W1, 0.0)]
    assert balance.moves(loads, 0.0) == []
    assert balance.moves(loads, LASTS_S - 1) == []
    assert balance.moves([load(W0, DIFFERENCE_S - 1, a=1, b=1), load(W1, 0.0)], LASTS_S) == []
    assert balance.moves(loads, LASTS_S + 1) == []
    assert balance.moves(loads, 2 * LASTS_S + 1) == [("b", W1)]
    assert balance.moves(loads, 2 * LASTS_S + 2) == []
    assert balance.moves(loads, 2 * LASTS_S + REST_S) == []


def test_a_run_that_is_the_only_work_of_its_worker_stays() -> None:
    """Otherwise the other worker would have the same load as this one now."""
    assert levelled([load(W0, 60.0, only=9), load(W1, 0.0)], frozenset()) == []


def test_the_largest_fitting_run_moves_first_and_idle_runs_stay() -> None:
    loads = [load(W0, 60.0, large=40, middle=15, small=5, none=0), load(W1, 0.0)]
    assert levelled(loads, frozenset()) == [("middle", W1), ("small", W1)]
    assert levelled(loads, {RunId("middle")}) == [("small", W1)]


@given(
    st.lists(st.floats(0, 120), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1e6)), max_size=20),
)
def test_moves_reduce_the_load_difference_and_never_reverse_it(
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
    """Simulate runs that request `demand` seconds of work per minute, all on w0 at first. Return
    the moves, and the final worker of each run.
    """
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


def test_some_of_eight_runs_move_to_a_second_worker_within_a_minute() -> None:
    moves, home = simulated(dict.fromkeys(RUNS, 30.0), [W0, W1], 600)
    assert moves
    assert max(now for now, _ in moves) < 60
    assert len({run for _, run in moves}) == len(moves)
    assert set(home.values()) == {W0, W1}


@given(st.lists(st.floats(0, 60), min_size=1, max_size=16), st.integers(2, 4))
@settings(max_examples=examples(35))
def test_no_run_moves_twice_in_ten_minutes_and_moves_end(demands: list[float], count: int) -> None:
    demand = {RunId(f"run{number}"): each for number, each in enumerate(demands)}
    workers = [WorkerId(f"w{number}") for number in range(count)]
    moves, _ = simulated(demand, workers, 1500)
    for run in demand:
        times = [now for now, each in moves if each == run]
        assert all(later - now >= QUIET_S for now, later in pairwise(times))
