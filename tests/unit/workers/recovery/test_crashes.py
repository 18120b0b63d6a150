"""Parts into which a step is split after crashes, and passes that exceed the memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_store.messages.ids import WorkerId
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.engine.ops import Datum, Op, OptimStep, Pass, UpcomingBatch
from cotrain_workers.recovery.crashes import Kill, LargePasses, groups_of, kills_of, name_of, select_ops


def ops_of(run: str, count: int) -> list[Op]:
    return [OptimStep(run, seq, 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0) for seq in range(1, count + 1)]


def named(groups: Sequence[Sequence[Op]]) -> list[str]:
    return [name_of(group) for group in groups]


def test_a_step_without_a_crash_stays_whole() -> None:
    assert named(groups_of([*ops_of("a", 2), *ops_of("b", 2)], {"a:1..a:2"})) == ["a:1..b:2"]


def test_a_step_is_split_between_runs_as_near_to_its_middle_as_possible() -> None:
    three = [*ops_of("a", 1), *ops_of("b", 1), *ops_of("c", 4)]
    assert named(groups_of(three, {"a:1..c:4"})) == ["a:1..b:1", "c:1..c:4"]
    assert named(groups_of([*ops_of("a", 5), *ops_of("b", 1)], {"a:1..b:1"})) == ["a:1..a:5", "b:1"]


def test_the_ops_of_one_run_are_halved_in_order() -> None:
    assert named(groups_of(ops_of("a", 5), {"a:1..a:5"})) == ["a:1..a:2", "a:3..a:5"]


def test_a_half_that_crashed_is_split_again_down_to_one_op() -> None:
    crashed = {"a:1..a:4", "a:1..a:2", "a:2"}
    assert named(groups_of(ops_of("a", 4), crashed)) == ["a:1", "a:2", "a:3..a:4"]
    crashed = {"a:1..a:4", "a:3..a:4"}
    assert named(groups_of(ops_of("a", 4), crashed)) == ["a:1..a:2", "a:3", "a:4"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_every_op_is_in_one_group_and_in_order(counts: list[int], data: st.DataObject) -> None:
    ops = [op for at, count in enumerate(counts) for op in ops_of(f"r{at}", count)]
    crashed: set[str] = set()
    for _ in range(len(ops)):
        groups = groups_of(ops, crashed)
        assert [op for group in groups for op in group] == ops
        crashed.add(name_of(data.draw(st.sampled_from(groups))))


LIMIT_BYTES = 2_000_000_000


def a_pass(run: str, seq: int, *lengths: int) -> Pass:
    datums = [Datum(np.zeros(length, np.int64), {}) for length in lengths]
    return Pass(run, seq, datums, "cross_entropy", {}, needs_grad=True)


def a_step(run: str, seq: int) -> OptimStep:
    return OptimStep(run, seq, 0.1, 0.9, 0.95, 1e-8, 0.0, 0.0)


def kill(request: str, tokens: int, count: int = 1) -> Kill:
    return Kill(request, tokens, "w0", count)


def chosen(ops: list[Op], *kills: Kill, deferred: Collection[str] = ()) -> list[tuple[str, int]]:
    return [op.id for op in select_ops(ops, kills, deferred, LIMIT_BYTES).ops]


OPS: list[Op] = [a_pass("a", 1, 9), a_pass("a", 2, 5000), a_step("a", 3), a_pass("b", 1, 8), a_step("b", 2)]


def test_ops_before_a_dangerous_request_run_first() -> None:
    assert chosen(OPS, kill("a:2", 5000)) == [("a", 1), ("b", 1), ("b", 2)]


def test_a_dangerous_request_that_has_waited_runs_apart_and_later_ops_wait() -> None:
    selected = select_ops(OPS[1:], [kill("a:2", 5000)], {"a:2"}, LIMIT_BYTES)
    assert [op.id for op in selected.ops] == [("a", 2)]
    assert (selected.is_alone, selected.killing_tokens, selected.failures) == (True, 5000, {})


def test_a_dangerous_request_without_neighbours_runs_at_once() -> None:
    assert chosen(OPS[1:3], kill("a:2", 5000)) == [("a", 2)]


def test_of_two_dangerous_requests_one_runs_at_a_time() -> None:
    ops: list[Op] = [a_pass("a", 1, 5000), a_pass("b", 1, 6000)]
    kills = [kill("a:1", 5000), kill("b:1", 6000)]
    assert chosen(ops, *kills, deferred={"a:1", "b:1"}) == [("a", 1)]


@pytest.mark.parametrize("kills", [[kill("a:2", 5000, 2)], [kill("a:2", 5300), kill("a:2", 5000)]])
def test_a_datum_that_ended_two_processes_fails_and_the_others_run(kills: list[Kill]) -> None:
    selected = select_ops(OPS, kills, (), LIMIT_BYTES)
    assert [op.id for op in selected.ops] == [("a", 1), ("a", 3), ("b", 1), ("b", 2)]
    assert not selected.is_alone
    failure = selected.failures["a", 2]
    assert (failure.category, failure.code) == ("user", "too_large")
    assert "a datum of 5,000 tokens, within a memory limit of 2.0 GB." in failure.message


def test_datums_that_together_ended_two_processes_run_in_smaller_slices() -> None:
    ops: list[Op] = [a_pass("a", 1, 500, 500, 500)]
    selected = select_ops(ops, [kill("a:1", 1500, 2)], (), LIMIT_BYTES)
    assert not selected.failures
    [op] = selected.ops
    assert isinstance(op, Pass)
    assert op.slice_tokens == 750


def test_only_counts_of_micro_batches_are_read() -> None:
    counts = {"s:train:0:1@5000/w.0": 2, "s:train:0:1": 1, "s:train:0:1..s:train:1:4": 1}
    assert kills_of(counts) == [Kill("s:train:0:1", 5000, "w.0", 2)]


class Counts:
    def __init__(self, **found: int) -> None:
        self.found = {name.replace("_", ":", 1): count for name, count in found.items()}
        self.seen: list[dict[str, int]] = []
        self.is_away = False

    def by_part(self) -> dict[str, int]:
        return dict(self.found)

    def risk(self, part: str) -> None:
        if self.is_away:
            raise CONNECTION_LOST[0]
        self.found[part] = self.found.get(part, 0) + 1
        self.seen.append(dict(self.found))

    def take_back(self, part: str) -> None:
        self.found[part] -= 1

    def survived(self, part: str) -> None:
        self.found.pop(part, None)


class FakeEngine:
    spared: int | None = None

    def watch_micro_batches(self, watch: Any) -> None:
        self.watch = watch

    def spare_memory(self, tokens: int) -> None:
        self.spared = tokens


def runs(engine: FakeEngine, tokens: int, longest: int, *, needs_grad: bool = True) -> None:
    with engine.watch(UpcomingBatch(("r", 1), tokens, longest, needs_grad)):
        pass


def test_a_micro_batch_is_recorded_while_it_is_the_largest_so_far() -> None:
    engine, counts = FakeEngine(), Counts()
    LargePasses(engine, counts, WorkerId("w0"))  # type: ignore[arg-type]
    for tokens, longest in ((256, 256), (2048, 64), (2048, 64), (1000, 900), (2048, 900)):
        runs(engine, tokens, longest)
    assert counts.seen == [{"r:1@2048/w0": 1}, {"r:1@1000/w0": 1}]
    assert counts.found == {}
    runs(engine, 2048, 64, needs_grad=False)
    assert len(counts.seen) == 3


def test_every_micro_batch_of_a_dangerous_request_is_recorded() -> None:
    engine, counts = FakeEngine(), Counts(**{"r_1@2048/w0": 1})
    passes = LargePasses(engine, counts, WorkerId("w0"))  # type: ignore[arg-type]
    assert passes.select([a_pass("r", 1, 2048)]).is_alone
    for tokens in (2048, 2048, 30):
        runs(engine, tokens, tokens)
    assert counts.seen == [{"r:1@2048/w0": 2}, {"r:1@2048/w0": 2}, {"r:1@2048/w0": 1, "r:1@30/w0": 1}]
    assert counts.found == {"r:1@2048/w0": 1}
    passes.forget(["r:1"])
    assert not passes.select([a_pass("r", 1, 2048)]).is_alone


def test_a_process_that_survives_running_out_of_memory_is_not_a_kill() -> None:
    engine, counts = FakeEngine(), Counts()
    LargePasses(engine, counts, WorkerId("w0"))  # type: ignore[arg-type]
    batch = UpcomingBatch(("r", 1), 2048, 64, needs_grad=True)
    with pytest.raises(MemoryError), engine.watch(batch):
        raise MemoryError
    assert counts.found == {}
    runs(engine, 2048, 64)
    assert len(counts.seen) == 2, "it did not fit, and is no measure of what does"


def test_an_unavailable_store_stops_no_pass() -> None:
    engine, counts = FakeEngine(), Counts()
    LargePasses(engine, counts, WorkerId("w0"))  # type: ignore[arg-type]
    counts.is_away = True
    runs(engine, 2048, 64)


@pytest.mark.parametrize(("worker", "spared"), [("w0", 5000), ("w1", None)])
def test_memory_is_spared_from_the_start_after_a_kill(worker: str, spared: int | None) -> None:
    engine = FakeEngine()
    LargePasses(engine, Counts(**{"r_1@5000/w0": 1}), WorkerId(worker))  # type: ignore[arg-type]
    assert engine.spared == spared
