"""Pass over several cycles: the bits of a pass in one cycle, and no effect before its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.adapters.copies import OPEN_GRADIENT
from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, CycleOutput, Failure, Op, Output, Pass, ReverseKl, Save
from cotrain_workers.engine.running_cycle import next_wave
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.pass_outputs import memory_failure
from tests.support.draws import variant
from tests.support.kl import kl_datums, random_weights, started
from tests.support.open_passes import LENGTHS, ONE_LAYER, SLICE, a_pass, a_step, assert_same_outputs, one_cycle
from tests.support.training import MIX, NewEngine, same_bits

OpId = tuple[str, int]

pytestmark = pytest.mark.numerics


def slice_by_slice(engine: Engine, ops: Sequence[Op]) -> Iterator[CycleOutput]:
    """Run ops with one slice of a pass per cycle, until all are done. Yield each cycle."""
    left = list(ops)
    while left:
        allowances = {op.id: 1 for op in left if isinstance(op, Pass | ReverseKl)}
        cycle = run_to_end(engine.cycle(left, allowances))
        left = [op for op in left if op.id not in cycle.outputs]
        yield cycle


def outputs_of(cycles: Iterator[CycleOutput]) -> dict[OpId, Output]:
    return {at: output for cycle in cycles for at, output in cycle.outputs.items()}


def two_engines(new_engine: NewEngine, **settings: object) -> tuple[Engine, Engine]:
    """Return two engines with run "a", which has a gradient of an earlier pass."""
    first, second = (new_engine(**ONE_LAYER, **settings) for _ in range(2))
    first.run([Create("a", 0, AdapterSpec(8, seed=1)), a_pass(1), a_step(2), a_pass(3)])
    second.adapters.restore("a", first.adapters.state("a"))
    return first, second


def test_passes_slice_by_slice_have_the_bits_of_whole_ones(new_engine: NewEngine) -> None:
    """The mix has every kind of rank, target, loss and length, and two gradients that add up, with a forward between."""
    divided, whole = (new_engine(micro_batch_tokens=SLICE) for _ in range(2))
    for cycle in range(2):
        ops = [op for tenant in MIX for op in tenant.ops(cycle)]
        cycles = list(slice_by_slice(divided, ops))
        assert len(cycles) > 4
        assert_same_outputs(outputs_of(iter(cycles)), dict(whole.run(ops).outputs))
    for tenant in MIX:
        assert same_bits(divided.adapters.state(tenant.run), whole.adapters.state(tenant.run))


@pytest.mark.parametrize(
    ("border", "needs_grad"),
    [
        *((border, True) for border in range(1, len(LENGTHS))),
        (1, False),
        *(variant(border, False) for border in range(2, len(LENGTHS))),
    ],
)
def test_a_pass_split_anywhere_has_the_bits_of_the_whole(
    new_engine: NewEngine, border: int, *, needs_grad: bool
) -> None:
    """Ops of another run are executed between its parts. Its own state is unchanged until its end."""
    divided, whole = two_engines(new_engine)
    before = divided.adapters.state("a")
    op, behind = a_pass(4, needs_grad=needs_grad), a_step(5)

    first = one_cycle(divided, [op, behind], a4=sum(LENGTHS[:border]))
    assert first.outputs == {}
    assert first.open_tokens == {("a", 4): sum(LENGTHS[:border])}
    assert first.tokens == sum(LENGTHS[:border])
    assert same_bits(divided.adapters.state("a"), before)
    divided.run([Create("b", 0, AdapterSpec(3, seed=2)), a_pass(1, "b"), a_step(2, "b")])
    last = divided.run([op, behind])

    assert last.open_tokens == {}
    assert last.divided["a", 4].now == last.tokens == sum(LENGTHS[border:])
    assert last.divided["a", 4].in_all == sum(LENGTHS)
    assert_same_outputs(dict(last.outputs), dict(whole.run([op, behind]).outputs))
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


@pytest.mark.parametrize("reference", [AdapterSpec(3, seed=21), None])
def test_a_reverse_kl_in_parts_has_the_bits_of_the_whole(new_engine: NewEngine, reference: AdapterSpec | None) -> None:
    divided, whole = (started(new_engine(micro_batch_tokens=SLICE)) for _ in range(2))
    weights = random_weights(reference, whole.adapters.layout_of) if reference else None
    ops: list[Op] = [ReverseKl("a", 1, kl_datums(0), weights, 0.7), a_step(2)]

    cycles = list(slice_by_slice(divided, ops))

    read = [len(datum.tokens) + len(datum.reference) for datum in kl_datums(0)]
    assert [cycle.open_tokens.get(("a", 1)) for cycle in cycles] == [*np.cumsum(read)[:-1].tolist(), None]
    assert_same_outputs(outputs_of(iter(cycles)), dict(whole.run(ops).outputs))
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


@pytest.mark.parametrize("bad", [0, len(LENGTHS) - 1])
def test_a_non_finite_loss_leaves_no_effect_of_any_part(new_engine: NewEngine, bad: int) -> None:
    divided, whole = two_engines(new_engine)
    op = a_pass(4)
    datums = list(op.datums)
    nan = np.full(len(datums[bad].tokens), np.nan, np.float32)
    datums[bad] = replace(datums[bad], inputs={**datums[bad].inputs, "weights": nan})

    outputs = outputs_of(slice_by_slice(divided, [replace(op, datums=datums), a_step(5)]))

    whole.run([a_step(5)])
    assert isinstance(outputs["a", 4], Failure)
    assert outputs["a", 4].code == "not_finite"
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


@pytest.mark.parametrize("what", ["restored", "dropped and restored"])
def test_a_replaced_adapter_restarts_its_open_pass(new_engine: NewEngine, what: str) -> None:
    divided, whole = two_engines(new_engine)
    state = divided.adapters.state("a")
    one_cycle(divided, [a_pass(4)], a4=30)
    assert ("a", 4) in divided.open_passes
    if what != "restored":
        divided.adapters.drop("a")
        assert not divided.open_passes.runs
    divided.adapters.restore("a", state)

    assert one_cycle(divided, [a_pass(4)], a4=20).open_tokens == {("a", 4): LENGTHS[0]}
    again = divided.run([a_pass(4)])

    assert_same_outputs(dict(again.outputs), dict(whole.run([a_pass(4)]).outputs))
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


def test_an_offloaded_adapter_continues_its_open_pass(new_engine: NewEngine) -> None:
    divided, whole = two_engines(new_engine, adapter_bytes=1)  # one adapter at a time
    one_cycle(divided, [a_pass(4)], a4=30)
    divided.run([Create("b", 0, AdapterSpec(3, seed=2)), a_pass(1, "b")])
    assert divided.adapters.offloaded == 1

    last = divided.run([a_pass(4), a_step(5)])

    assert last.tokens == sum(LENGTHS[2:])
    whole.run([a_pass(4), a_step(5)])
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


def test_gradients_of_open_passes_are_within_the_adapter_budget(new_engine: NewEngine) -> None:
    """This holds for any number of open passes: gradients unused by a cycle are offloaded with their adapters."""
    runs = [f"r{number}" for number in range(6)]
    whole = new_engine(**ONE_LAYER)
    spec = AdapterSpec(8, seed=1)
    arena = 4 * whole.adapters.layout_of(spec).size
    engine = new_engine(**ONE_LAYER, adapter_bytes=2 * 5 * arena)
    bank, most = engine.adapters, 0
    for each in (engine, whole):
        each.run([Create(run, 0, spec) for run in runs])
    left = len(LENGTHS)
    while left:
        for at in range(0, len(runs), 2):
            ops = [a_pass(1, run, seed=at) for run in runs[at : at + 2]]
            work = engine.cycle(ops, {(run, 1): 1 for run in runs[at : at + 2]})
            for _ in work:
                adapters = bank._adapter_by_run.values()
                arenas = [arena for each in adapters for arena in each.arenas.values()]
                kept = [state.gradient for state in engine.open_passes._state_by_run.values()]
                arenas += [gradient.flat for gradient in kept if gradient]
                most = max(most, sum(each.nbytes for each in arenas))
        left -= 1
        assert len(engine.open_passes.runs) == (len(runs) if left else 0)
        assert bank.by_tier["device"][1] <= 2 * 5 * arena
    assert 2 * 3 * arena < most <= 2 * 5 * arena
    for at, run in enumerate(runs):
        whole.run([a_pass(1, run, seed=at - at % 2)])
        assert same_bits(bank.state(run), whole.adapters.state(run))


def test_a_gradient_dropped_on_the_host_is_not_restored(new_engine: NewEngine) -> None:
    divided, whole = two_engines(new_engine, adapter_bytes=1)
    one_cycle(divided, [a_pass(4)], a4=30)
    divided.run([Create("b", 0, AdapterSpec(3, seed=2))])
    assert divided.adapters.offloaded == 1
    for engine in (divided, whole):
        engine.run([a_step(5)])
    assert OPEN_GRADIENT not in divided.adapters["a"].arenas
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


def test_another_first_op_of_a_run_drops_its_open_pass(new_engine: NewEngine) -> None:
    engine, _ = two_engines(new_engine)
    one_cycle(engine, [a_pass(4)], a4=20)
    engine.run([Create("b", 0, AdapterSpec(1, seed=0))])
    assert ("a", 4) in engine.open_passes
    engine.run([a_step(5)])
    assert not engine.open_passes.runs


def test_an_open_pass_delays_only_its_own_run(new_engine: NewEngine) -> None:
    engine, _ = two_engines(new_engine)
    of_a: list[Op] = [a_pass(4), a_pass(5, needs_grad=False), a_step(6), Save("a", 7)]
    of_b: list[Op] = [Create("b", 0, AdapterSpec(3, seed=2)), a_pass(1, "b"), a_step(2, "b"), Save("b", 3)]

    out = one_cycle(engine, [*of_a, *of_b], a4=20)

    assert out.outputs.keys() == {op.id for op in of_b}
    out = one_cycle(engine, of_a, a4=1000, a5=1)
    assert out.outputs.keys() == {("a", 4)}
    assert out.open_tokens == {("a", 5): LENGTHS[0]}
    assert engine.run(of_a[1:]).outputs.keys() == {("a", 5), ("a", 6), ("a", 7)}


def test_after_the_deadline_only_whole_passes_and_the_oldest_run_go_on(new_engine: NewEngine) -> None:
    engine, _ = two_engines(new_engine)
    engine.run([Create("b", 0, AdapterSpec(3, seed=2)), Create("c", 0, AdapterSpec(2, seed=3))])
    ops: list[Op] = [a_pass(4), a_pass(1, "b"), a_step(2, "b"), a_pass(1, "c"), a_pass(2, "c")]

    allowances = {("a", 4): 1000, ("c", 1): 1000}
    out = run_to_end(engine.cycle(ops, allowances, is_over=lambda: True))

    assert out.outputs.keys() == {("b", 1), ("b", 2)}
    assert out.open_tokens == {("a", 4): LENGTHS[0], ("c", 1): 0}
    ops = [a_pass(3, "b", needs_grad=False), a_pass(4), a_pass(1, "c")]
    allowances = {("a", 4): 1000, ("c", 1): 1000, ("b", 3): 1000}
    found = []
    for _ in range(3):
        out = run_to_end(engine.cycle(ops, allowances, is_over=lambda: True))
        found.append([out.open_tokens[op.run, op.seq] for op in ops])
    first, second = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    assert found == [[0, first, first], [first, first, first], [first, second, first]]
    out = run_to_end(engine.cycle(ops, allowances))
    assert not out.open_tokens


def test_a_deadline_in_the_middle_stops_after_the_current_micro_batch(new_engine: NewEngine) -> None:
    engine, whole = two_engines(new_engine)
    asked = iter([False, True])
    out = run_to_end(engine.cycle([a_pass(4), a_pass(5)], {("a", 4): 1000}, lambda: next(asked, True)))
    assert out.open_tokens == {("a", 4): sum(LENGTHS[:2])}
    # The pass has ended and time is up, so the op after it keeps waiting.
    out = run_to_end(engine.cycle([a_pass(4), a_pass(5)], {("a", 4): 1000}, stops_after(3)))
    assert out.outputs.keys() == {("a", 4)}
    engine.run([a_pass(5)])
    whole.run([a_pass(4), a_pass(5)])
    assert same_bits(engine.adapters.state("a"), whole.adapters.state("a"))


def stops_after(asked: int) -> Callable[[], bool]:
    left = iter([False] * (asked - 1))
    return lambda: next(left, True)


def test_an_invalid_pass_fails_at_once_and_delays_no_other(new_engine: NewEngine) -> None:
    engine, _ = two_engines(new_engine)
    outside = replace(a_pass(4), loss_fn="no_such_loss")
    out = one_cycle(engine, [outside, a_step(5), a_pass(1, "x")], a4=1, x1=1)
    assert isinstance(out.outputs["a", 4], Failure)
    assert isinstance(out.outputs["x", 1], Failure)
    assert ("a", 5) in out.outputs
    assert not engine.open_passes.runs


def test_a_wave_ends_for_a_run_with_its_first_divisible_pass() -> None:
    ops = [a_pass(1), a_pass(2), a_pass(3), a_pass(1, "b"), a_pass(2, "b")]
    wave, later = next_wave(ops, {("a", 2): 5, ("a", 3): 5})
    assert [op.id for op in wave] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert [op.id for op in later] == [("a", 3)]


def out_of_memory_above(engine: Engine, most: int) -> list[int]:
    """Make the base model run out of memory on rows of more than `most[0]` tokens. Return that list."""
    limit = [most]

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > limit[0]:
            raise torch.OutOfMemoryError

    engine._base.backbone.register_forward_pre_hook(refuse, with_kwargs=True)
    return limit


def test_running_out_of_memory_in_a_later_cycle_keeps_earlier_sums(new_engine: NewEngine) -> None:
    """Slices that would have run together run apart. None is split, so the bits are equal."""
    divided, whole = (new_engine(micro_batch_tokens=64, recompute="never") for _ in range(2))
    small: list[Op] = [Create("b", 0, AdapterSpec(2, seed=3)), a_pass(1, "b")]
    large = replace(a_pass(1), datums=[*a_pass(1).datums, *a_pass(2).datums])
    for engine in (divided, whole):
        engine.run([Create("a", 0, AdapterSpec(8, seed=1)), *small])
    one_cycle(divided, [large], a1=1)
    out_of_memory_above(divided, 64)  # the bucket of one slice

    out = one_cycle(divided, [large, a_pass(2, "b")], a1=1000)

    assert out.is_exact
    whole.run([large, a_pass(2, "b")])
    for run in ("a", "b"):
        assert same_bits(divided.adapters.state(run), whole.adapters.state(run))


def test_a_split_slice_makes_the_cycle_of_its_result_inexact(new_engine: NewEngine) -> None:
    engine = new_engine(micro_batch_tokens=64, recompute="never")
    large = replace(a_pass(1), datums=[*a_pass(1).datums, *a_pass(2).datums])
    engine.run([Create("a", 0, AdapterSpec(8, seed=1)), Create("b", 0, AdapterSpec(2, seed=3))])
    limit = out_of_memory_above(engine, 48)

    first = one_cycle(engine, [large, a_step(1, "b")], a1=1)
    limit[0] = 1000
    last = engine.run([large])

    assert engine.cut_slices == 1
    assert first.open_tokens == {("a", 1): sum(LENGTHS[:4])}
    assert first.is_exact  # all results of this cycle are exact
    assert not last.is_exact
    assert last.divided["a", 1].in_all == 2 * sum(LENGTHS)


def test_a_datum_too_large_for_memory_fails_its_open_pass_cleanly(new_engine: NewEngine) -> None:
    divided, whole = two_engines(new_engine, recompute="never")
    one_cycle(divided, [a_pass(4)], a4=30)
    out_of_memory_above(divided, 0)

    out = one_cycle(divided, [a_pass(4)], a4=1)

    assert out.outputs == {("a", 4): memory_failure(LENGTHS[2])}
    assert not divided.open_passes.runs
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))
