"""Queue in memory: the worker of each run, the order of turns, and the runs to read again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_scheduler.queue import PoolQueue, tokens_of
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue

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
    queue.taken([op("hot", seq) for seq in range(4)], W0, NOW)
    queue.put([row("new")])
    queue.assign([beat(W0), beat(W1)], NOW + later_s)
    assert "new" in order(queue, chosen)["t"]


def test_a_pass_over_several_cycles_is_counted_once() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("large", worker=W0)])
    queue.taken([op("large", 0)], W0, NOW)
    queue.put([replace(row("large", worker=W0), done_tokens=6)])
    assert queue._tokens[W0] == 4
    queue.taken([op("large", 0)], W0, NOW)
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
    queue.taken([op("a", 0), op("b", 0), op("b", 1)], W0, NOW)
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
    queue.taken([op("few", 0), op("many", 0)], W0, NOW)
    assert queue.unread == {"many"}
    queue.put([row("many", WINDOW, first=1, worker=W0)])
    assert queue.unread == set()


def test_a_returning_run_waits_for_the_same_worker() -> None:
    queue = PoolQueue(WINDOW)
    queue.put([row("a", worker=W0), row("b", worker=W1)])
    assert queue.has_all(W0, [])
    assert queue.has_all(W0, [RunId("a")])
    assert not queue.has_all(W0, [RunId("a"), RunId("b")])
    assert not queue.has_all(W0, [RunId("not here")])


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
            queue.taken([op(run, queue[RunId(run)].ops[0].seq)], W0, NOW)
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
