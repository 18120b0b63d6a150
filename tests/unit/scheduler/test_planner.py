from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_scheduler.planner import (
    Fairness,
    Selection,
    budget,
    cost,
    runnable_prefix,
)
from cotrain_scheduler.planner import select as select_by_tenant
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue
from tests.support.draws import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSES = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD, OpKind.REVERSE_KL)
TAIL = {OpKind.SAVE, OpKind.LOAD}
KINDS = [*PASSES, OpKind.OPTIM_STEP, *TAIL, OpKind.REJECTED]


def op(run: str, seq: int, kind: OpKind = OpKind.FORWARD_BACKWARD, tokens: int = 10) -> QueuedOp:
    return QueuedOp(RunId(run), seq, kind, tokens if kind in PASSES else 0, "inline", 1, 0.0)


def queue_of(run: str, tenant: str, ops: list[QueuedOp]) -> RunQueue:
    return RunQueue(RunId(run), TenantId(tenant), WorkerId("w0"), tuple(ops))


def select(
    rows: list[RunQueue], fairness: Fairness, budget_tokens: int, *quantum: int, **more: Any
) -> Selection:
    """Choose from runs in the order they came."""
    waiting: dict[TenantId, list[RunQueue]] = {}
    for row in rows:
        waiting.setdefault(row.tenant, []).append(row)
    return select_by_tenant(waiting, fairness, budget_tokens, *quantum, **more)


def heartbeat(name: str, runs: int = 0, tokens_per_s: float = 100.0) -> WorkerHeartbeat:
    return WorkerHeartbeat(WorkerId(name), 1, "serving", "cpu", tokens_per_s, runs, 0, 0.0)


@st.composite
def queues(draw: st.DrawFn) -> list[RunQueue]:
    rows = []
    for number in range(draw(st.integers(1, 8))):
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
        sizes = draw(st.lists(st.integers(1, 300), min_size=len(kinds), max_size=len(kinds)))
        ops = [
            op(f"r{number}", 5 + i, k, n) for i, (k, n) in enumerate(zip(kinds, sizes, strict=True))
        ]
        rows.append(queue_of(f"r{number}", f"t{draw(st.integers(0, 3))}", ops))
    return rows


@given(queues(), st.integers(1, 1000), st.integers(1, 500))
def test_a_run_is_never_reordered_and_never_skips(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    chosen = select(rows, Fairness(), budget_tokens, quantum).ops
    for row in rows:
        mine = [chosen_op for chosen_op in chosen if chosen_op.run == row.run]
        assert mine == list(row.ops[: len(mine)])


@given(queues(), st.integers(1, 1000), st.integers(1, 500))
def test_weights_change_at_most_once_per_run_and_only_after_its_passes(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    chosen = select(rows, Fairness(), budget_tokens, quantum).ops
    for row in rows:
        kinds = [chosen_op.kind for chosen_op in chosen if chosen_op.run == row.run]
        assert kinds.count(OpKind.OPTIM_STEP) <= 1
        if OpKind.OPTIM_STEP in kinds:
            after = kinds[kinds.index(OpKind.OPTIM_STEP) + 1 :]
            assert set(after) <= TAIL | {OpKind.REJECTED}


@given(queues(), st.integers(1, 1000), st.integers(1, 500))
def test_a_run_is_only_saved_and_loaded_after_a_save_or_load_in_the_same_cycle(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    chosen = select(rows, Fairness(), budget_tokens, quantum).ops
    for row in rows:
        kinds = [chosen_op.kind for chosen_op in chosen if chosen_op.run == row.run]
        first = next((place for place, kind in enumerate(kinds) if kind in TAIL), len(kinds))
        assert set(kinds[first:]) <= TAIL | {OpKind.REJECTED}


@given(queues(), st.integers(1, 1000), st.integers(1, 500))
def test_the_budget_holds_unless_one_op_alone_exceeds_it(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    chosen = select(rows, Fairness(), budget_tokens, quantum).ops
    assert chosen
    assert len(chosen) == 1 or sum(map(cost, chosen)) <= budget_tokens


@given(queues(), st.integers(1, 1000), st.integers(1, 500))
@settings(max_examples=examples(50))
def test_repeated_cycles_serve_every_op_exactly_once(
    rows: list[RunQueue], budget_tokens: int, quantum: int
) -> None:
    served: list[tuple[str, int]] = []
    fairness = Fairness()
    expected = sorted((row.run, queued.seq) for row in rows for queued in row.ops)
    while rows:
        selection = select(rows, fairness, budget_tokens, quantum)
        fairness = selection.fairness
        served += [(chosen.run, chosen.seq) for chosen in selection.ops]
        rows = without(rows, selection.ops)
    assert sorted(served) == expected


def without(rows: list[RunQueue], taken: tuple[QueuedOp, ...]) -> list[RunQueue]:
    gone = {(chosen.run, chosen.seq) for chosen in taken}
    left = [replace(r, ops=tuple(o for o in r.ops if (o.run, o.seq) not in gone)) for r in rows]
    return [row for row in left if row.ops]


@given(
    st.lists(st.lists(st.integers(20, 400), min_size=1, max_size=4), min_size=2, max_size=5),
    st.integers(1, 600),
    st.integers(50, 1500),
    st.integers(3, 15),
)
@settings(max_examples=examples(50))
def test_backlogged_tenants_get_the_same_tokens_within_one_quantum_and_one_op(
    sizes: list[list[int]], quantum: int, budget_tokens: int, cycles: int
) -> None:
    """Every tenant always has forward_backwards of its own repeating sizes waiting."""
    position = [0] * len(sizes)
    served: Counter[int] = Counter()
    fairness = Fairness()
    for _ in range(cycles):
        rows = []
        for tenant, pattern in enumerate(sizes):
            ops = [
                op(f"r{tenant}", seq, tokens=pattern[seq % len(pattern)])
                for seq in range(position[tenant], position[tenant] + budget_tokens // 20 + 2)
            ]
            rows.append(queue_of(f"r{tenant}", f"t{tenant}", ops))
        selection = select(rows, fairness, budget_tokens, quantum)
        fairness = selection.fairness
        for chosen in selection.ops:
            tenant = int(chosen.run[1:])
            position[tenant] += 1
            served[tenant] += chosen.tokens
        largest = max(map(max, sizes))
        totals = [served[tenant] for tenant in range(len(sizes))]
        assert max(totals) - min(totals) <= quantum + largest


def test_a_step_submitted_whole_runs_in_one_cycle() -> None:
    step = [op("r", 1), op("r", 2), op("r", 3, OpKind.OPTIM_STEP)]
    assert runnable_prefix([*step, op("r", 4)]) == step


def test_what_is_saved_is_what_the_step_left() -> None:
    step = [op("r", 1), op("r", 2, OpKind.OPTIM_STEP), op("r", 3, OpKind.SAVE)]
    rejected = op("r", 4, OpKind.REJECTED)
    saves = [op("r", 5, OpKind.SAVE), op("r", 6, OpKind.SAVE)]
    cycle = [*step, rejected, *saves]
    assert runnable_prefix([*cycle, op("r", 7)]) == cycle
    assert runnable_prefix([*cycle, op("r", 7, OpKind.OPTIM_STEP)]) == cycle
    assert runnable_prefix([op("r", 1), op("r", 2, OpKind.SAVE), op("r", 3)]) == [
        op("r", 1),
        op("r", 2, OpKind.SAVE),
    ]


def test_weights_are_not_reassigned_under_a_pass() -> None:
    cycle = [op("r", 1), op("r", 2, OpKind.LOAD), op("r", 3, OpKind.SAVE), op("r", 4, OpKind.LOAD)]
    assert runnable_prefix([*cycle, op("r", 5)]) == cycle
    assert runnable_prefix([op("r", 5, OpKind.LOAD), op("r", 6, OpKind.OPTIM_STEP)]) == [
        op("r", 5, OpKind.LOAD)
    ]


def test_a_run_trains_in_the_cycle_that_makes_it_unless_it_is_made_by_a_load() -> None:
    for kind in (OpKind.CREATE, OpKind.IMPORT):
        step = [op("r", 0, kind), op("r", 1, OpKind.REVERSE_KL), op("r", 2, OpKind.OPTIM_STEP)]
        assert runnable_prefix(step) == step
    loaded = op("r", 0, OpKind.LOAD)
    assert runnable_prefix([loaded, op("r", 1)]) == [loaded]


def test_a_barrier_holds_back_its_own_run_only() -> None:
    rows = [
        queue_of("a", "t", [op("a", 1, OpKind.OPTIM_STEP), op("a", 2)]),
        queue_of("b", "t", [op("b", 1), op("b", 2)]),
    ]
    chosen = select(rows, Fairness(), 1000).ops
    assert [(o.run, o.seq) for o in chosen] == [("a", 1), ("b", 1), ("b", 2)]


def test_the_runs_of_a_tenant_take_turns() -> None:
    rows = [queue_of(run, "t", [op(run, 1), op(run, 2)]) for run in ("a", "b")]
    chosen = select(rows, Fairness(), budget_tokens=20).ops
    assert [(o.run, o.seq) for o in chosen] == [("a", 1), ("b", 1)]
    chosen = select(rows, Fairness(), budget_tokens=40).ops
    assert [(o.run, o.seq) for o in chosen] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_a_budget_is_used_to_the_last_token() -> None:
    ops = [op("a", 1), op("a", 2), op("a", 3)]
    assert select([queue_of("a", "t", ops)], Fairness(), budget_tokens=20).ops == tuple(ops[:2])


def test_what_has_no_tokens_takes_one_of_a_budget() -> None:
    saves = [op("a", seq, OpKind.SAVE) for seq in range(5)]
    assert select([queue_of("a", "t", saves)], Fairness(), budget_tokens=3).ops == tuple(saves[:3])


def test_a_newcomer_stands_behind_those_who_wait() -> None:
    rows = [queue_of(name, name, [op(name, 1), op(name, 2)]) for name in ("a", "b", "c")]
    waiting = Fairness(ring=(TenantId("b"), TenantId("c")))
    selection = select(rows, waiting, 30, 10)
    assert [o.run for o in selection.ops] == ["a", "b", "c"]
    assert selection.fairness.ring == ("b", "c", "a")
    assert [o.run for o in select(rows, waiting, 20, 10).ops] == ["b", "c"]


def test_a_visit_that_was_cut_off_is_its_own_tenants_alone() -> None:
    rows = [queue_of(name, name, [op(name, 1), op(name, 2)]) for name in ("b", "c")]
    for gone in ((), (TenantId("gone"),)):
        ring = (*gone, TenantId("b"), TenantId("c"))
        cut_off = Fairness(ring, {TenantId("b"): 0}, in_visit=True)
        chosen = select(rows, cut_off, 10, 10).ops
        assert [o.run for o in chosen] == ["b" if gone else "c"]


def test_who_has_nothing_to_do_saves_no_tokens_up() -> None:
    rows = [queue_of("a", "a", [op("a", 1)]), queue_of("b", "b", [op("b", 1), op("b", 2)])]
    fairness = select(rows, Fairness(), 20, 1000).fairness
    assert fairness.ring == ("b",)
    assert set(fairness.deficits) == {"b"}


def test_the_budget_is_what_the_worker_does_in_a_period() -> None:
    assert budget(heartbeat("w", tokens_per_s=1500.0), 10.0) == 15_000
    assert budget(heartbeat("w", tokens_per_s=0.0), 10.0) == 1


def test_only_those_are_read_whose_turn_it_is() -> None:
    read = []

    def rows_of(tenant: str) -> Iterator[RunQueue]:
        for number in range(3):
            read.append(f"{tenant}{number}")
            yield queue_of(f"{tenant}{number}", tenant, [op(f"{tenant}{number}", 5)])

    waiting = {TenantId(tenant): rows_of(tenant) for tenant in "abcdef"}
    chosen = select_by_tenant(waiting, Fairness(), 40, 20)
    assert [chosen_op.run for chosen_op in chosen.ops] == ["a0", "a1", "b0", "b1"]
    assert read == [
        "a0",
        "a1",
        "a2",
        "b0",
        "b1",
        "b2",
        "c0",
    ]  # one beyond each visit, to know its cost
    assert chosen.fairness.ring == tuple("cdefab")
