"""Ops of one cycle, the runnable prefix of a run, and the start and limit of a cycle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cotrain_scheduler import planner
from cotrain_scheduler.planner import (
    FADES,
    FIRST_TOKENS,
    GATHER_SHARE,
    GROWTH,
    LIMITS,
    PATIENCE,
    QUANTA_PER_CYCLE,
    LastCycle,
    Selection,
    budget,
    cost,
    cycle_limit_s,
    eager_start,
    period_number,
    return_time_s,
    runnable_prefix,
)
from cotrain_scheduler.planner import select as select_of_waiting
from cotrain_scheduler.queue import FairQueue
from cotrain_store.messages.fleet import LEAST_WEIGHT, MAX_WEIGHT, WorkerHeartbeat
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import PASSES, OpKind, QueuedOp, RunQueue
from tests.support.draws import examples
from tests.support.planning import leads, op, waiting_of

TAIL = {OpKind.SAVE, OpKind.LOAD}
ANYWHERE = {OpKind.REJECTED, OpKind.METRICS}
KINDS = [*PASSES, OpKind.OPTIM_STEP, *TAIL, OpKind.REWIND, *sorted(ANYWHERE)]


def queue_of(run: str, tenant: str, ops: list[QueuedOp]) -> RunQueue:
    return RunQueue(RunId(run), TenantId(tenant), WorkerId("w0"), tuple(ops))


def select(rows: list[RunQueue], fair_queue: FairQueue, budget_tokens: int, *quantum: int, **more: Any) -> Selection:
    """Select from runs in the order of their arrival."""
    return select_of_waiting(waiting_of(rows, fair_queue), fair_queue, budget_tokens, *quantum, **more)


def heartbeat(name: str, runs: int = 0, tokens_per_s: float = 100.0) -> WorkerHeartbeat:
    return WorkerHeartbeat(WorkerId(name), 1, "serving", "cpu", tokens_per_s, runs, 0, 0.0)


@st.composite
def queues(draw: st.DrawFn, token_limit: int = 300) -> list[RunQueue]:
    rows = []
    for number in range(draw(st.integers(1, 8))):
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
        sizes = draw(st.lists(st.integers(1, token_limit), min_size=len(kinds), max_size=len(kinds)))
        ops = [op(f"r{number}", 5 + i, k, n) for i, (k, n) in enumerate(zip(kinds, sizes, strict=True))]
        rows.append(queue_of(f"r{number}", f"t{draw(st.integers(0, 3))}", ops))
    return rows


@given(queues(), st.integers(1, 1000), st.integers(1, 500))
@settings(max_examples=examples(180))
def test_a_cycle_keeps_the_order_of_its_runs_and_its_budget(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    selection = select(rows, FairQueue(), budget_tokens, quantum)
    for row in rows:
        mine = [chosen for chosen in selection.ops if chosen.run == row.run]
        assert mine == list(row.ops[: len(mine)])
        kinds = [chosen.kind for chosen in mine]
        assert OpKind.REWIND not in kinds[1:]
        assert kinds.count(OpKind.OPTIM_STEP) <= 1
        assert all(kinds.count(kind) <= most for kind, most in LIMITS.items())
        # Only saves, loads and ops that touch no weights follow a step, a save or a load.
        last = [*TAIL, OpKind.OPTIM_STEP]
        first = next((place for place, kind in enumerate(kinds) if kind in last), len(kinds))
        assert set(kinds[first + 1 :]) <= TAIL | ANYWHERE
    assert selection.ops
    assert selection.tokens == planned_tokens(selection)
    if len(rows) > 1:
        assert selection.tokens <= budget_tokens
    else:  # The last pass may exceed the budget, and is stopped in time.
        passes = [chosen for chosen in selection.ops if chosen.kind in PASSES]
        assert sum(map(cost, passes[:-1])) < budget_tokens
        over = selection.tokens > budget_tokens
        assert set(selection.allowances) == ({passes[-1].request_id} if over else set())


def planned_tokens(selection: Selection) -> int:
    return sum(selection.allowances.get(op.request_id, cost(op)) for op in selection.ops)


@given(queues(token_limit=3_000), st.integers(1, 1000), st.integers(1, 500))
def test_a_pass_of_two_quanta_is_split_and_a_smaller_one_is_not(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    assume(len(rows) > 1)
    least = min(quantum, max(1, budget_tokens // QUANTA_PER_CYCLE))
    selection = select(rows, FairQueue(), budget_tokens, quantum)
    for row in rows:
        mine = [chosen for chosen in selection.ops if chosen.run == row.run]
        parts = [op for op in mine if op.request_id in selection.allowances]
        assert parts in ([], mine[-1:])  # nothing is planned after an unfinished pass
        for part in parts:
            allowance = selection.allowances[part.request_id]
            assert part.kind in PASSES
            assert least <= allowance <= cost(part) - least


@given(queues(token_limit=3_000), st.integers(1, 1000), st.integers(1, 500))
@settings(max_examples=examples(50))
def test_repeated_cycles_serve_every_op_and_every_token_once(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    served: list[str] = []
    tokens = 0
    fair_queue = FairQueue()
    expected = sorted(queued.request_id for row in rows for queued in row.ops)
    in_all = sum(cost(queued) for row in rows for queued in row.ops)
    while rows:
        selection = select(rows, fair_queue, budget_tokens, quantum)
        again = select(list(rows), fair_queue, budget_tokens, quantum)
        assert replace(again, fair_queue=selection.fair_queue) == selection
        fair_queue = selection.fair_queue
        tokens += selection.tokens
        before, rows = rows, after(rows, selection)
        left = {queued.request_id for row in rows for queued in row.ops}
        served += [o.request_id for row in before for o in row.ops if o.request_id not in left]
    assert sorted(served) == expected
    assert tokens == in_all


def after(rows: list[RunQueue], selection: Selection) -> list[RunQueue]:
    """Return the queues after the selected tokens ran. A run without ops is removed."""
    left = []
    for row in rows:
        count = sum(op.run == row.run for op in selection.ops)
        if not count:
            left.append(row)
            continue
        last, begun = row.ops[count - 1], 0
        if last.request_id in selection.allowances:
            begun = selection.allowances[last.request_id] + (count == 1) * row.done_tokens
        is_open = 0 < begun < cost(last)
        left.append(replace(row, ops=row.ops[count - is_open :], done_tokens=begun if is_open else 0))
    return [row for row in left if row.ops]


class Backlogged:
    """Tenants that always have pending passes of repeating sizes, and the tokens served to each."""

    def __init__(
        self, sizes: list[list[int]], quantum: int, budget_tokens: int, weights: list[float] | None = None
    ) -> None:
        self.weights = {TenantId(f"t{t}"): weight for t, weight in enumerate(weights or [])}
        self.sizes, self.quantum, self.budget = sizes, quantum, budget_tokens
        self.fair_queue = FairQueue()
        self.served = [0] * len(sizes)
        self.rows = [queue_of(f"r{t}", f"t{t}", []) for t in range(len(sizes))]
        self.seqs = [0] * len(sizes)

    def cycle(self) -> Selection:
        self.rows = [self.refilled(tenant) for tenant in range(len(self.sizes))]
        selection = select(self.rows, self.fair_queue, self.budget, self.quantum, weights=self.weights)
        self.fair_queue = selection.fair_queue
        for chosen in selection.ops:
            begun = self.begun(chosen)
            tokens = selection.allowances.get(chosen.request_id, chosen.tokens - begun)
            self.served[int(chosen.run[1:])] += tokens
        kept = {row.run: row for row in after(self.rows, selection)}
        self.rows = [kept.get(row.run, replace(row, ops=(), done_tokens=0)) for row in self.rows]
        return selection

    def refilled(self, tenant: int) -> RunQueue:
        row, sizes = self.rows[tenant], self.sizes[tenant]
        first = row.ops[0].seq if row.ops else self.seqs[tenant]
        many = self.budget // min(sizes) + 2
        ops = [op(row.run, s, tokens=sizes[s % len(sizes)]) for s in range(first, first + many)]
        self.seqs[tenant] = first + many
        return replace(row, ops=tuple(ops))

    def begun(self, chosen: QueuedOp) -> int:
        row = self.rows[int(chosen.run[1:])]
        return row.done_tokens if chosen == row.ops[0] else 0


mixed = st.lists(st.lists(st.integers(20, 4_000), min_size=1, max_size=4), min_size=2, max_size=5)


weights = st.just([1.0] * 5) | st.lists(
    st.floats(LEAST_WEIGHT, MAX_WEIGHT).map(lambda w: round(w, 1)), min_size=5, max_size=5
)


@given(mixed, weights, st.integers(1, 600), st.integers(50, 1500), st.integers(3, 15))
@settings(max_examples=examples(50))
def test_backlogged_tenants_get_tokens_by_their_weights_within_two_quanta(
    sizes: list[list[int]], weights: list[float], quantum: int, budget_tokens: int, cycles: int
) -> None:
    weights = weights[: len(sizes)]
    tenants = Backlogged(sizes, quantum, budget_tokens, weights)
    for _ in range(cycles):
        tenants.cycle()
        served = [tokens / weight for tokens, weight in zip(tenants.served, weights, strict=True)]
        rounding = 0.0 if set(weights) == {1.0} else 1e-6
        assert max(served) - min(served) < 2 * quantum / min(weights) + rounding


def test_a_tenant_with_weight_2_gets_twice_the_tokens_under_contention() -> None:
    tenants = Backlogged([[300], [300], [300]], 10, 1000, [1.0, 2.0, 1.0])
    for _ in range(30):
        tenants.cycle()
    light, heavy, other = tenants.served
    assert abs(heavy - 2 * light) < 4 * 10
    assert abs(light - other) < 2 * 10


@given(
    mixed, weights, st.integers(1, 600), st.integers(100, 1500), st.integers(1, 10),
    st.integers(1, 99), st.just(1.0) | st.floats(LEAST_WEIGHT, MAX_WEIGHT),
)  # fmt: skip
@settings(max_examples=examples(50))
def test_a_newcomer_waits_at_most_in_proportion_to_the_weights(
    sizes: list[list[int]], weights: list[float], quantum: int, budget_tokens: int, cycles: int,
    tokens: int, own: float,
) -> None:  # fmt: skip
    weights = weights[: len(sizes)]
    rounding = 0.0 if {*weights, own} == {1.0} else 1e-6
    tenants = Backlogged(sizes, quantum, budget_tokens, weights)
    for _ in range(cycles):
        tenants.cycle()
    tenants.sizes = [*sizes, [tokens]]
    tenants.rows.append(queue_of(f"r{len(sizes)}", "newcomer", []))
    tenants.weights[TenantId("newcomer")] = own
    tenants.seqs.append(0)
    tenants.served = [0] * len(tenants.sizes)
    while not tenants.served[-1]:
        tenants.cycle()
        if not tenants.served[-1]:
            for served, weight in zip(tenants.served[:-1], weights, strict=True):
                assert served < tokens * weight / own + 2 * quantum + rounding


def test_a_barrier_delays_only_its_own_run() -> None:
    rows = [
        queue_of("a", "t", [op("a", 1, OpKind.OPTIM_STEP), op("a", 2)]),
        queue_of("b", "t", [op("b", 1), op("b", 2)]),
    ]
    chosen = select(rows, FairQueue(), 1000).ops
    assert [(o.run, o.seq) for o in chosen] == [("a", 1), ("b", 1), ("b", 2)]


def test_the_runs_of_a_tenant_are_served_in_turn() -> None:
    rows = [queue_of(run, "t", [op(run, seq) for seq in range(20)]) for run in ("a", "b")]
    first = select(rows, FairQueue(), 170)
    assert [(o.run, o.seq) for o in first.ops] == [*(("a", seq) for seq in range(9)), *(("b", seq) for seq in range(8))]


def test_a_large_pass_leaves_a_turn_to_other_runs_of_its_tenant() -> None:
    rows = [queue_of("a", "t", [op("a", 1, tokens=9_000)]), queue_of("b", "t", [op("b", 1)])]
    selection = select(rows, FairQueue(), 1_600, 100)
    assert [(o.run, o.seq) for o in selection.ops] == [("a", 1), ("b", 1)]
    assert selection.allowances == {"a:1": 1_500}


def test_the_cost_of_an_open_pass_is_its_remaining_tokens() -> None:
    rest = replace(queue_of("a", "t", [op("a", 1, tokens=500)]), done_tokens=450)
    others = [queue_of("b", "u", [op("b", 1, tokens=50)])]
    selection = select([rest, *others], FairQueue(), 100, 50)
    assert (len(selection.ops), selection.allowances, selection.tokens) == (2, {}, 100)
    overrun = replace(rest, done_tokens=501)  # The count was not exact, and the pass still has to end.
    assert select([overrun, *others], FairQueue(), 100, 50).tokens == 51


def test_only_the_first_op_can_be_partly_done() -> None:
    row = queue_of("a", "t", [op("a", 0, OpKind.SAVE), op("a", 1, tokens=500)])
    assert select([replace(row, done_tokens=450)], FairQueue(), 1000).tokens == 0
    row = queue_of("a", "t", [op("a", 0, OpKind.CREATE), op("a", 1, tokens=500)])
    assert select([replace(row, done_tokens=450)], FairQueue(), 1000).tokens == 500


@pytest.mark.parametrize("tail", [OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.LOAD])
def test_an_op_after_a_planned_pass_has_no_cost(tail: OpKind) -> None:
    rows = [queue_of(f"r{n}", f"t{n:02}", [op(f"r{n}", 1), op(f"r{n}", 2, tail)]) for n in range(20)]
    selection = select(rows, FairQueue(), 160)
    assert {o.run: o.seq for o in selection.ops} == {f"r{n}": 2 for n in range(16)}


def test_an_op_without_tokens_is_in_the_next_cycle_at_any_load() -> None:
    large = [queue_of(f"r{n}", f"t{n}", [op(f"r{n}", 1, tokens=10_000)]) for n in range(100)]
    kinds = (OpKind.CREATE, OpKind.OPTIM_STEP, OpKind.SAVE, OpKind.LOAD, *sorted(ANYWHERE))
    free = [queue_of(f"s{kind}", "t0", [op(f"s{kind}", 0, kind)]) for kind in kinds]
    selection = select([*large, *free], FairQueue(), 100)
    assert {o.kind for o in selection.ops} == {*kinds, OpKind.FORWARD_BACKWARD}
    assert selection.tokens <= 100


def test_a_budget_is_used_to_the_last_token() -> None:
    rows = [queue_of("a", "t", [op("a", 1), op("a", 2)]), queue_of("b", "u", [op("b", 1)])]
    assert select(rows, FairQueue(), 20).tokens == 20


def test_a_single_pass_may_take_a_whole_period_together_with_its_step() -> None:
    step = [op("a", 1, tokens=900), op("a", 2, OpKind.OPTIM_STEP), op("a", 3, OpKind.SAVE)]
    selection = select([queue_of("a", "t", step)], FairQueue(), 100)
    assert (selection.ops, selection.allowances) == (tuple(step), {"a:1": 900})
    assert leads(selection.fair_queue) == {}  # a tenant that arrives later finds no tenant behind
    begun = replace(queue_of("a", "t", step), done_tokens=700)
    assert select([begun], FairQueue(), 100).allowances == {"a:1": 200}
    saving = queue_of("b", "u", [op("b", 1, OpKind.SAVE)])
    divided = select([begun, saving], FairQueue(), 100)
    assert divided.allowances == {"a:1": 96}  # sixteen quanta
    blocked = select([begun, saving], FairQueue(), 100, accepts_saves=False)
    assert blocked.allowances == {"a:1": 200}


def test_only_one_pass_of_a_single_run_may_exceed_the_budget() -> None:
    ops = [op("a", seq, tokens=60) for seq in range(1, 5)]
    selection = select([queue_of("a", "t", ops)], FairQueue(), 100)
    assert (selection.ops, selection.allowances) == (tuple(ops[:2]), {"a:2": 60})
    whole = select([queue_of("a", "t", ops)], FairQueue(), 120)
    assert (whole.ops, whole.allowances) == (tuple(ops[:2]), {})


def test_the_lead_of_a_tenant_lasts_until_the_others_are_even() -> None:
    rows = [queue_of(name, name, [op(name, 1), op(name, 2)]) for name in ("a", "b")]
    owing = FairQueue({TenantId("a"): 10})
    alike = [queue_of(f"c{n}", "c", [op(f"c{n}", 1)]) for n in range(20)]
    away = select([rows[1], *alike], owing, 100)
    assert leads(away.fair_queue) == {}  # all waiting tenants were served equally, and a only as much
    still = select([rows[1], *alike], FairQueue({TenantId("a"): 900}), 100)
    assert leads(still.fair_queue) == {"a": 820}
    assert leads(select(rows, owing, 1000).fair_queue) == {}  # no tenant is waiting any more


def test_a_tenant_is_charged_for_the_tokens_that_ran() -> None:
    rows = [queue_of(name, name, [op(name, 1, tokens=5_000)]) for name in ("a", "b")]
    first = select(rows, FairQueue(), 1_600, 100)
    assert first.allowances == {"a:1": 800, "b:1": 800}
    ran = [replace(row, done_tokens=tokens) for row, tokens in zip(rows, (1_200, 700), strict=True)]
    second = select(ran, first.fair_queue, 1_600, 100)
    assert second.allowances == {"a:1": 600, "b:1": 1_000}
    ended = [queue_of("a", "a", [op("a", 2, tokens=5_000)]), ran[1]]
    third = select(ended, first.fair_queue, 1_600, 100)
    assert third.allowances == {"b:1": 1_600}  # a had 5,000 at once


def test_the_budget_is_the_work_of_one_period_and_grows_relative_to_the_previous_cycle() -> None:
    """Measured: a throughput from small cycles, 100 times too high, once led to a cycle of 24 s."""
    assert budget(heartbeat("w", tokens_per_s=1500.0), 10.0, last_tokens=0) == 15_000
    assert budget(heartbeat("w", tokens_per_s=0.0), 10.0, last_tokens=0) == 1
    fast = heartbeat("w", tokens_per_s=1e6)
    assert budget(fast, 10.0, last_tokens=256) == FIRST_TOKENS
    assert budget(fast, 10.0, last_tokens=FIRST_TOKENS) == GROWTH * FIRST_TOKENS
    assert budget(fast, 10.0, last_tokens=10**9) == 10_000_000


def test_only_runs_whose_turn_it_is_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(ops: tuple[QueuedOp, ...], **more: bool) -> list[QueuedOp]:
        read.append(ops[0].run)
        return runnable_prefix(ops, **more)

    monkeypatch.setattr(planner, "runnable_prefix", noted)
    rows = [queue_of(f"{t}{n}", t, [op(f"{t}{n}", 5)]) for t in "abc" for n in range(100)]
    chosen = select(rows, FairQueue(), 160)
    assert len(chosen.ops) == 16
    assert len(read) == 16 + 3  # one more of each tenant, for its cost


def test_an_unchanged_tenant_is_not_read() -> None:
    rows = [queue_of(f"{t}{n}", t, [op(f"{t}{n}", 5)]) for t in "abc" for n in range(100)]
    waiting = waiting_of(rows, FairQueue())
    before = select_of_waiting(waiting, FairQueue(), 160).fair_queue
    waiting.changed.clear()
    waiting.passes = {TenantId(t): waiting.passes[TenantId(t)] for t in "ab"}  # c cannot be read
    assert [turn for turn in before.waiting if turn == "c"] == ["c"]
    assert {o.run[0] for o in select_of_waiting(waiting, before, 20).ops} <= {"a", "b"}


def test_a_step_submitted_at_once_runs_in_one_cycle() -> None:
    step = [op("r", 1), op("r", 2), op("r", 3, OpKind.OPTIM_STEP)]
    assert runnable_prefix([*step, op("r", 4)]) == step


def test_a_save_stores_the_weights_after_its_step() -> None:
    step = [op("r", 1), op("r", 2, OpKind.OPTIM_STEP), op("r", 3, OpKind.SAVE)]
    rejected = op("r", 4, OpKind.REJECTED)
    saves = [op("r", 5, OpKind.SAVE), op("r", 6, OpKind.SAVE)]
    cycle = [*step, rejected, *saves]
    assert runnable_prefix([*cycle, op("r", 7)]) == cycle
    assert runnable_prefix([*cycle, op("r", 7, OpKind.OPTIM_STEP)]) == cycle
    assert runnable_prefix([op("r", 1), op("r", 2, OpKind.SAVE), op("r", 3)]) == [op("r", 1), op("r", 2, OpKind.SAVE)]


def test_weights_are_not_replaced_during_a_pass() -> None:
    cycle = [op("r", 1), op("r", 3, OpKind.SAVE), op("r", 4, OpKind.LOAD)]
    assert runnable_prefix([*cycle, op("r", 5)]) == cycle
    assert runnable_prefix([op("r", 5, OpKind.LOAD), op("r", 6, OpKind.OPTIM_STEP)]) == [op("r", 5, OpKind.LOAD)]


def test_a_cycle_takes_at_most_four_saves_and_one_load_of_a_run() -> None:
    loads = [op("r", seq, OpKind.LOAD) for seq in range(1, 61)]
    assert runnable_prefix(loads) == loads[:1]
    saves = [op("r", seq, OpKind.SAVE) for seq in range(1, 61)]
    assert runnable_prefix(saves) == saves[:4]
    rejected = op("r", 5, OpKind.REJECTED)
    assert runnable_prefix([*saves[:4], rejected, *saves[5:]]) == [*saves[:4], rejected]
    mixed = [saves[0], op("r", 2, OpKind.LOAD), *saves[2:5], op("r", 6, OpKind.LOAD)]
    assert runnable_prefix(mixed) == mixed[:5]
    assert runnable_prefix(saves, accepts_saves=False) == []
    assert runnable_prefix(mixed[1:], accepts_saves=False) == mixed[1:2]


def test_a_run_trains_in_the_cycle_of_its_creation_but_not_of_its_load() -> None:
    for kind in (OpKind.CREATE, OpKind.IMPORT):
        step = [op("r", 0, kind), op("r", 1, OpKind.REVERSE_KL), op("r", 2, OpKind.OPTIM_STEP)]
        assert runnable_prefix(step) == step
    loaded = op("r", 0, OpKind.LOAD)
    assert runnable_prefix([loaded, op("r", 1)]) == [loaded]


A, B = RunId("a"), RunId("b")
SLOW = 10.0
"""Recent return time longer than any gather window."""


def test_a_cycle_starts_at_once_when_every_run_has_returned() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=8.0, ended_at=100.0)
    assert eager_start(last, 100.001, 5.0, SLOW, are_back=True) == 100.001
    assert eager_start(LastCycle(), 3.0, 5.0, SLOW, are_back=True) == 3.0


def test_runs_just_answered_get_a_tenth_of_the_last_cycle_to_return() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    assert eager_start(last, 100.01, 0.005, SLOW, are_back=False) == 100.2
    assert eager_start(last, 100.3, 0.005, SLOW, are_back=False) == 100.3


def test_the_wait_is_limited_to_a_multiple_of_recent_return_times() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    assert eager_start(last, 100.01, 0.005, 0.02, are_back=False) == 100.0 + PATIENCE * 0.02
    assert eager_start(last, 100.0, 0.005, 0.0, are_back=False) == 100.005


def test_no_cycle_waits_for_tenants_that_left() -> None:
    last = LastCycle(frozenset({A, B}), duration_s=2.0, ended_at=100.0)
    assert eager_start(last, 500.0, 0.005, SLOW, are_back=False) == 500.0


def test_the_return_time_is_the_longest_in_the_window_and_decays() -> None:
    assert return_time_s(0.0, [0.0, 0.15, 0.25, 7.0], limit_s=2.0) == 0.15
    assert return_time_s(0.15, [0.01], limit_s=2.0) == FADES * 0.15


def test_periods_start_at_multiples_of_their_length() -> None:
    assert period_number(9.99, 10.0) == 0
    assert period_number(10.0, 10.0) == 1


@pytest.mark.parametrize("period_s", [0.5, 10.0, 60.0])
def test_a_request_after_the_start_of_a_cycle_is_answered_in_a_period(period_s: float) -> None:
    """The wait is the rest of that cycle, the gather window and the whole next cycle, with a tenth
    of a period to spare.
    """
    limit_s = cycle_limit_s(period_s, begins_at_once=True)
    next_begins = eager_start(
        LastCycle(frozenset({A}), limit_s, ended_at=limit_s), limit_s, 0.005, SLOW, are_back=False
    )
    assert next_begins == pytest.approx(limit_s * (1 + GATHER_SHARE))
    assert next_begins + limit_s < 0.9 * period_s


def test_a_metronome_cycle_fills_its_period() -> None:
    assert cycle_limit_s(10.0, begins_at_once=False) == 10.0
