"""Placement of new runs, reassignment of the runs of a missing worker, and moves in simulated time."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_scheduler.placement import (
    DIFFERENCE_S,
    FIRST_TOKENS,
    LASTS_S,
    MEMORY_S,
    REST_S,
    Balance,
    Load,
    RecentTokens,
    absences,
    best,
    fits_one_more,
    levelled,
    load_of,
    rates,
    reassignments,
)
from cotrain_scheduler.queue import PoolQueue
from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue
from cotrain_store.oplog.moves import QUIET_S
from tests.support.draws import examples

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


def beat(**facts: Any) -> WorkerHeartbeat:
    return WorkerHeartbeat(W0, 1, "serving", "cuda", 1e4, 0, 0, 0.0, **facts)


def assigned(workers: list[WorkerHeartbeat], runs: int) -> PoolQueue:
    """Return a queue of new runs with 1,000 tokens each, assigned to workers."""
    queue = PoolQueue(window_ops=8)
    for run in (RunId(f"r{number:02}") for number in range(runs)):
        op = QueuedOp(run, 0, OpKind.FORWARD, 1_000, "inline", 0, 0.0)
        queue.put([RunQueue(run, TenantId("t"), None, (op,))])
    queue.assign(workers, 0.0)
    return queue


def test_a_worker_twice_as_fast_gets_twice_the_tokens() -> None:
    slow = WorkerHeartbeat(W0, 1, "serving", "cpu", 100.0, 0, 0, 0.0)
    fast = WorkerHeartbeat(W1, 1, "serving", "cuda", 200.0, 0, 0, 0.0)
    queue = assigned([slow, fast], 30)
    assert (queue.waiting_tokens(W0), queue.waiting_tokens(W1)) == (10_000, 20_000)


def test_the_rate_of_a_worker_is_bounded_by_others_with_its_device() -> None:
    def of(name: WorkerId, device: str, tokens_per_s: float) -> WorkerHeartbeat:
        return WorkerHeartbeat(name, 1, "serving", device, tokens_per_s, 0, 0, 0.0)

    cpus = [of(W0, "cpu", 3_000.0), of(W1, "cpu", 4_600.0), of(W2, "cpu", 54_000.0)]
    assert rates(cpus) == {W0: 3_000.0, W1: 4_600.0, W2: 9_200.0}
    mixed = [of(W0, "cpu", 3_000.0), of(W1, "cuda", 40_000.0), of(W2, "cuda", 0.0)]
    assert rates(mixed) == {W0: 3_000.0, W1: 40_000.0, W2: 10_000.0}
    assert rates([]) == {}


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=8))
def test_every_worker_gets_runs_at_any_measured_rate(measured: list[float]) -> None:
    workers = [
        WorkerHeartbeat(WorkerId(f"w{n}"), 1, "serving", "cpu", rate, 0, 0, 0.0) for n, rate in enumerate(measured)
    ]
    queue = assigned(workers, 5 * len(workers))
    assert all(queue.waiting_tokens(worker.id) for worker in workers)


def test_a_worker_without_memory_for_an_adapter_is_the_last_choice() -> None:
    assert best({W0: 0.0, W1: 1e7}, full={W0}) == W1
    assert best({W0: 0.0}, full={W0}) == W0
    with pytest.raises(ValueError, match="empty"):
        best({})


@pytest.mark.parametrize(
    ("count", "size", "limit", "fits"), [(0, 0, 10, True), (2, 6, 9, True), (2, 6, 8, False), (2, 6, 0, True)]
)
def test_a_worker_needs_memory_for_one_more_average_adapter(count: int, size: int, limit: int, fits: bool) -> None:
    worker = beat(adapters={"device": count}, adapter_bytes={"device": size}, adapter_limit_bytes=limit)
    assert fits_one_more(worker) is fits


@given(st.lists(st.floats(10, 1e5), min_size=1, max_size=6), st.lists(st.floats(1, 1e6), max_size=40))
def test_workers_differ_by_at_most_one_run_of_any_size(rates: list[float], runs: list[float]) -> None:
    tokens = {WorkerId(f"w{number}"): 0.0 for number in range(len(rates))}
    rate_of = dict(zip(tokens, rates, strict=True))
    for run in runs:
        tokens[best({name: tokens[name] / rate_of[name] for name in tokens})] += run
    seconds = [tokens[name] / rate_of[name] for name in tokens]
    assert max(seconds) - min(seconds) <= max(runs, default=0.0) / min(rates) * (1 + 1e-9)


def test_recent_tokens_decay() -> None:
    recent = RecentTokens()
    recent.add(RunId("a"), W0, 100.0, 50.0)
    assert recent.of(W0, 50.0) == 100.0
    assert recent.of(W0, 50.0 + MEMORY_S) == pytest.approx(100 / math.e)
    assert recent.of(W0, 0.0) == 100.0  # the host's clock was set back
    assert recent.of(W1, 50.0) == 0.0


def test_a_new_run_counts_as_an_average_one_before_its_first_request() -> None:
    recent = RecentTokens()
    recent.settle(RunId("first"), W0, 0.0)
    assert recent.of(W0, 0.0) == FIRST_TOKENS
    recent.add(RunId("first"), W0, 1_000.0, 0.0)
    recent.settle(RunId("second"), W1, 0.0)
    assert recent.of(W1, 0.0) == FIRST_TOKENS + 1_000
    recent.settle(RunId("second"), W1, 0.0)
    assert recent.of(W1, 0.0) == FIRST_TOKENS + 1_000


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from([W0, W1, W2]), st.integers(0, 10_000),
            st.floats(0, 30),
        )
    )
)  # fmt: skip
def test_the_tokens_of_a_run_count_for_its_current_worker(acts: list[tuple[str, WorkerId, int, float]]) -> None:
    recent, now = RecentTokens(), 0.0
    asked: list[tuple[str, int, float]] = []
    home: dict[str, WorkerId] = {}
    for run, worker, tokens, passed_s in acts:
        now += passed_s
        recent.add(RunId(run), worker, tokens, now)
        asked.append((run, tokens, now))
        home[run] = worker
    for worker in (W0, W1, W2):
        left = [tokens * math.exp((at - now) / MEMORY_S) for run, tokens, at in asked if home[run] == worker]
        assert recent.of(worker, now) == pytest.approx(sum(left), abs=1e-6)


def test_idle_runs_are_removed_from_the_recent_tokens() -> None:
    recent = RecentTokens()
    for number in range(10_000):
        recent.add(RunId(f"run{number}"), W0, 5.0, float(number))
    assert len(recent._of_run) < 2_500


NOW = 1_000.0


def alive(name: str, runs: int = 0) -> WorkerSlot:
    worker = WorkerId(name)
    return WorkerSlot(worker, 1, WorkerHeartbeat(worker, 1, "serving", "cpu", 1.0, runs, 0, NOW))


def dead(name: str, epoch: int = 1) -> WorkerSlot:
    return WorkerSlot(WorkerId(name), epoch, None)


def reassigned(*slots: WorkerSlot, empty_for_s: float = 30.0) -> list[tuple[str, str]]:
    since = absences(slots, {}, NOW)
    pairs = reassignments(slots, since, NOW + empty_for_s, after_s=30.0)
    return [(slot.worker, successor) for slot, successor in pairs]


def test_the_serving_worker_with_the_fewest_runs_is_the_successor() -> None:
    assert reassigned(dead("a"), alive("b", 5), alive("c", 2), alive("d", 2)) == [("a", "c")]


def test_all_missing_workers_get_successors_at_once() -> None:
    assert reassigned(dead("a"), alive("b"), dead("c")) == [("a", "b"), ("c", "b")]


def test_no_worker_is_a_successor_before_the_delay_or_without_a_heartbeat() -> None:
    assert reassigned(dead("a"), alive("b"), empty_for_s=29.9) == []
    assert reassigned(dead("a"), dead("b"), empty_for_s=1e6) == []


def test_the_delay_starts_when_a_worker_is_first_missing_per_process() -> None:
    first = absences([dead("a"), alive("b")], {}, NOW)
    assert first == {("a", 1): NOW}
    assert absences([dead("a"), alive("b")], first, NOW + 9) == {("a", 1): NOW}
    assert absences([alive("a"), alive("b")], first, NOW + 9) == {}
    assert absences([dead("a", epoch=2)], first, NOW + 9) == {("a", 2): NOW + 9}


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
