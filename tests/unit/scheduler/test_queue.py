"""Queue in memory: the worker of each run, the order of turns, and the runs to read again.

A planner that re-reads everything each time confirms the incremental fair queue.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_scheduler.planner import Selection, select
from cotrain_scheduler.queue import FairQueue, PoolQueue, Waiting, tokens_of
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue
from tests.support.draws import examples

W0, W1 = WorkerId("w0"), WorkerId("w1")
WINDOW = 4
NOW = 100.0


def op(run: str, seq: int) -> QueuedOp:
    return QueuedOp(RunId(run), seq, OpKind.FORWARD, 10, "inline", 1, 0.0)


def row(run: str, count: int = 1, *, first: int = 0, worker: WorkerId | None = None, tenant: str = "t") -> RunQueue:
    ops = tuple(op(run, first + n) for n in range(count))
    return RunQueue(RunId(run), TenantId(tenant), worker, ops)


def beat(name: WorkerId, runs: int = 0) -> WorkerHeartbeat:
    return WorkerHeartbeat(name, 1, "serving", "cpu", 1e4, runs, 0, 0.0)


def order(queue: PoolQueue, worker: WorkerId) -> dict[str, list[str]]:
    return {tenant: list(runs) for tenant, runs in queue.waiting(worker).passes.items()}


def test_a_run_stays_on_its_worker_and_a_new_one_goes_to_the_least_load() -> None:
    """The number of idle runs on a worker does not count."""
    queue = PoolQueue(WINDOW)
    queue.put([row("a", 4, worker=W0), row("b", worker=W1)])
    queue.put([row("new")])
    queue.assign([beat(W0), beat(W1, runs=900)], NOW)
    assert order(queue, W0) == {"t": ["a"]}
    assert order(queue, W1) == {"t": ["b", "new"]}


@pytest.mark.parametrize(("later_s", "chosen"), [(1.0, W1), (1000.0, W0)])
def test_recent_requests_count_after_planning_and_decay(later_s: float, chosen: WorkerId) -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("hot", 4, worker=W0), row("waits", worker=W1)])
    queue.remove_planned([op("hot", seq) for seq in range(4)], W0, NOW)
    queue.put([row("new")])
    queue.assign([beat(W0), beat(W1)], NOW + later_s)
    assert "new" in order(queue, chosen)["t"]


def test_a_pass_over_several_cycles_is_counted_once() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("large", worker=W0)])
    queue.remove_planned([op("large", 0)], W0, NOW)
    queue.put([replace(row("large", worker=W0), done_tokens=6)])
    assert queue._tokens[W0] == 4
    queue.remove_planned([op("large", 0)], W0, NOW)
    assert queue.recent.of(W0, NOW) == 10


def test_new_runs_that_arrive_one_by_one_are_spread_evenly() -> None:
    queue = PoolQueue(WINDOW)
    for run in "abcd":
        queue.put([row(run)])
        queue.assign([beat(W0), beat(W1)], NOW)
    assert order(queue, W0) == {"t": ["a", "c"]}
    assert order(queue, W1) == {"t": ["b", "d"]}


def test_runs_not_begun_move_when_their_worker_is_deregistered() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("a"), row("b"), row("mine", worker=W1)])
    queue.assign([beat(W0), beat(W1)], NOW)
    queue.assign([beat(W0)], NOW)
    assert order(queue, W0) == {"t": ["a", "b"]}
    assert order(queue, W1) == {"t": ["mine"]}  # in the memory of its worker
    queue.deregister(W1)
    queue.assign([beat(W0)], NOW)
    assert order(queue, W0) == {"t": ["a", "b", "mine"]}


def test_without_a_worker_runs_wait() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("a")])
    queue.assign([], NOW)
    assert len(queue) == 1
    queue.assign([beat(W0)], NOW)
    assert order(queue, W0) == {"t": ["a"]}


def test_a_served_run_goes_behind_the_other_runs_of_its_tenant() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row(run, 2, worker=W0) for run in "abc"])
    queue.remove_planned([op("a", 0), op("b", 0), op("b", 1)], W0, NOW)
    assert order(queue, W0) == {"t": ["c", "a"]}
    assert [one.seq for one in queue[RunId("a")].ops] == [1]
    queue.put([row("b", first=2, worker=W0)])
    assert order(queue, W0) == {"t": ["c", "a", "b"]}


def test_a_run_with_more_ops_keeps_its_turn() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row(run, worker=W0) for run in "abc"])
    queue.put([row("a", 3, worker=W0)])
    assert order(queue, W0) == {"t": ["a", "b", "c"]}
    assert len(queue[RunId("a")].ops) == 3


def test_a_run_without_ops_is_removed_together_with_its_tenant() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("a", worker=W0, tenant="x"), row("b", worker=W0, tenant="y")])
    queue.put([row("a", 0, worker=W0, tenant="x"), row("never seen", 0)])
    assert order(queue, W0) == {"y": ["b"]}
    assert len(queue) == 1


def test_a_run_taken_over_by_another_worker_is_queued_there() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("a", worker=W0)])
    queue.put([row("a", worker=W1)])
    assert (order(queue, W0), order(queue, W1)) == ({}, {"t": ["a"]})


def test_a_full_window_is_read_again() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("few", WINDOW - 1, worker=W0), row("many", WINDOW, worker=W0)])
    queue.remove_planned([op("few", 0), op("many", 0)], W0, NOW)
    assert queue.unread == {"many"}
    queue.put([row("many", WINDOW, first=1, worker=W0)])
    assert queue.unread == set()


def test_a_returning_run_waits_for_the_same_worker() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("a", worker=W0), row("b", worker=W1)])
    accepted_at = queue[RunId("a")].ops[0].accepted_at
    assert queue.back_at(W0, [RunId("a"), RunId("b"), RunId("not here")]) == {"a": accepted_at}


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 6), st.sampled_from(["put", "take", "strike", "assign"]))
    )
)
def test_after_any_sequence_each_run_is_queued_exactly_once(acts: list[tuple[str, int, str]]) -> None:
    queue, expected = PoolQueue(WINDOW), dict[str, int]()
    for run, count, act in acts:
        if act == "put":
            worker = (None, W0, W1)[count % 3]
            queue.put([row(run, count, worker=worker, tenant=run.translate({100: 97, 101: 97}))])
            expected[run] = count
        elif act == "take" and expected.get(run):
            queue.remove_planned([op(run, queue[RunId(run)].ops[0].seq)], W0, NOW)
            expected[run] -= 1
        elif act == "strike":
            queue.deregister(W0)
        else:
            queue.assign([beat(W0, count), beat(W1)][: 1 + count % 2], NOW)
    known = {run: count for run, count in expected.items() if count}
    queue.assign([beat(W0), beat(W1)], NOW)
    found = [one for worker in (W0, W1) for one in queue.waiting(worker)]
    assert {one.run: len(one.ops) for one in found} == known
    assert len(found) == len(queue) == len(known)
    counted = {worker: sum(map(tokens_of, queue.waiting(worker))) for worker in (W0, W1)}
    assert {worker: queue._tokens[worker] for worker in (W0, W1)} == counted


def test_runs_begun_by_a_worker_begin_anew_in_its_next_process() -> None:
    queue = PoolQueue(WINDOW)
    begun = replace(row("begun", worker=W0), done_tokens=5)
    queue.put([begun, row("not begun", worker=W0), replace(begun, run=RunId("other"), worker=W1)])
    queue.reset(W0)
    done = {run: queue[RunId(run)].done_tokens for run in ("begun", "not begun", "other")}
    assert done == {"begun": 0, "not begun": 0, "other": 5}


Weights = dict[TenantId, float]
KINDS = [*[OpKind.FORWARD_BACKWARD] * 4, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.REJECTED]
ops = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 900)), min_size=1, max_size=6)
weights = st.sampled_from([{}, {}, {TenantId("t0"): 3.0}])
#: A run is sent ops. A cycle has a budget and runs a part of its allowances. The first ops of a run are cancelled.
acts = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 5), ops),
    st.tuples(
        st.just("cycle"), st.sampled_from([60, 1_600, 2_000, 5_000]), st.floats(0.1, 1.5), st.booleans(), weights
    ),
    st.tuples(st.just("cancel"), st.integers(0, 5), st.integers(1, 6)),
)


class Pool:
    """Queue that is updated as its runs are sent ops, and a planner that reads all of it each time."""

    def __init__(self) -> None:
        self.queue, self.runs = PoolQueue(64), dict[RunId, RunQueue]()
        self.fair_queue = FairQueue()
        self.naive = Naive()
        self.seqs = dict[RunId, int]()

    def send(self, number: int, kinds: list[tuple[OpKind, int]]) -> None:
        run = RunId(f"r{number}")
        known = self.runs.get(run)
        row = known or RunQueue(run, TenantId(f"t{number % 3}"), W0, ())
        for kind, tokens in kinds:
            seq = self.seqs[run] = self.seqs.get(run, 0) + 1
            sent = QueuedOp(run, seq, kind, tokens, "inline", 1, 0.0)
            row = replace(row, ops=(*row.ops, sent))
        self.put(row)

    def cancel(self, number: int, count: int) -> None:
        if known := self.runs.get(RunId(f"r{number}")):
            self.put(replace(known, ops=known.ops[count:], done_tokens=0))

    def put(self, row: RunQueue) -> None:
        self.queue.put([row])
        if row.ops:
            self.runs[row.run] = row
        else:
            self.runs.pop(row.run, None)

    def cycle(self, budget: int, ran: float, accepts_saves: bool, weights: Weights) -> None:
        waiting = self.queue.waiting(W0)
        if not waiting:
            return
        chosen = select(waiting, self.fair_queue, budget, 100, accepts_saves=accepts_saves, weights=weights)
        naive = self.naive.select(waiting, budget, weights, accepts_saves=accepts_saves)
        assert replace(chosen, fair_queue=naive.fair_queue) == naive
        if not chosen.ops:
            return
        self.fair_queue = chosen.fair_queue
        self.naive.fair_queue = naive.fair_queue
        self.queue.remove_planned(chosen.ops, W0, 0.0)
        rows = {run: self.runs.pop(run) for run in {op.run for op in chosen.ops}}
        for run, row in rows.items():  # an unfinished pass is put back, as the commit does
            last = [op for op in chosen.ops if op.run == run][-1]
            left = tuple(op for op in row.ops if op.seq > last.seq)
            allowed = chosen.allowances.get(last.request_id, last.tokens)
            begun = row.done_tokens if last == row.ops[0] else 0
            tokens = begun + max(1, int(allowed * ran))
            if last.request_id in chosen.allowances and tokens < last.tokens:
                row = replace(row, ops=(last, *left), done_tokens=tokens)
            else:
                row = replace(row, ops=left, done_tokens=0)
            self.put(row)


class Naive:
    """Planner that reads everything each time. It keeps the served tokens of each tenant, but no next part."""

    def __init__(self) -> None:
        self.fair_queue = FairQueue()

    def select(self, waiting: Waiting, budget: int, weights: Weights, *, accepts_saves: bool) -> Selection:
        everything = Waiting()
        for row in waiting:
            everything.put(row)
        everything.changed.update(self.fair_queue.waiting)
        before = self.fair_queue.copy()
        before.quantum = 0  # at any earlier value: all parts are recomputed
        return select(everything, before, budget, 100, accepts_saves=accepts_saves, weights=weights)


@given(st.lists(acts, min_size=1, max_size=60))
@settings(max_examples=examples(300))
def test_the_incremental_queue_selects_what_a_full_read_selects(acts: list[tuple]) -> None:  # type: ignore[type-arg]
    pool = Pool()
    for name, *given_ in acts:
        getattr(pool, name)(*given_)


def test_a_tenant_without_work_has_no_turn() -> None:
    pool = Pool()
    for number in range(3):
        pool.send(number, [(OpKind.FORWARD_BACKWARD, 1)])
    pool.cycle(1, 1.0, True, {})  # takes one of them
    pool.cancel(1, 1)
    pool.cancel(2, 1)
    assert not pool.queue.waiting(W0)
    pool.send(0, [(OpKind.FORWARD_BACKWARD, 1)])
    pool.send(3, [(OpKind.FORWARD_BACKWARD, 1)])
    chosen = select(pool.queue.waiting(W0), pool.fair_queue, 1, 100)
    assert (len(chosen.ops), chosen.tokens) == (1, 1)
