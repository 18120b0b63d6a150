"""Comparison of the incremental fair queue with a planner that re-reads everything each time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_scheduler.fair_queue import FairQueue
from cotrain_scheduler.planner import Selection, select
from cotrain_scheduler.queue import PoolQueue, Waiting
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue
from tests.support.draws import examples

W0 = WorkerId("w0")
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
        self.queue.taken(chosen.ops, W0, 0.0)
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
