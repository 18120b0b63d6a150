"""Datum above the token limit of micro-batches: other work runs between its layers, without a change of bits."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from cotrain_workers.engine import engine as engine_module
from cotrain_workers.engine.coordination import Yielding, drive
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model import activation_checkpointing
from cotrain_workers.engine.ops import Create, Op, OptimStep, Pass, PassOutput
from cotrain_workers.engine.routing import Route
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training import batch_runner
from cotrain_workers.engine.training.batch_runner import BatchRunner
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.heads import HeadResult
from cotrain_workers.engine.training.long_slices import MAX_SUSPENDED, HostInputs, StartedLong
from cotrain_workers.engine.training.micro_batches import Budget
from tests.support import tiny_models
from tests.support.draws import variant
from tests.support.open_passes import assert_same_output
from tests.support.training import MIX, NewEngine, random_datum, relative_error, same_bits

LIMIT = 16
LAYERS = 2
SPEC = AdapterSpec(4, seed=3)
STEP = OptimStep("long", 2, 1e-2, 0.9, 0.95, 1e-8, 0.01, grad_clip_norm=1.0)


def long_pass(loss_fn: str = "cross_entropy", *lengths: int, needs_grad: bool = True) -> Pass:
    rng = np.random.default_rng(7)
    datums = [random_datum(rng, loss_fn, length) for length in lengths or (50,)]
    return Pass("long", 1, datums, loss_fn, {}, needs_grad=needs_grad)


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make long datums run in one piece."""
    monkeypatch.setattr(ForwardBackward, "_is_long", lambda *args: False)


def begun(new_engine: NewEngine, spec: AdapterSpec = SPEC, **settings: Any) -> Engine:
    """Return an engine in which B is no longer zero."""
    engine = new_engine(micro_batch_tokens=LIMIT, **settings)
    short = replace(long_pass("cross_entropy", 8), seq=1)
    engine.run([Create("long", 0, spec), short, STEP])
    return engine


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *(("qwen3", "never"), ("gemma2", "always"), ("bamba", "never")),
        *(variant("qwen3", "always"), variant("gemma2", "never"), variant("bamba", "always")),
        *(variant("gemma3", each) for each in ("never", "always")),
    ],
)
def test_a_layered_pass_has_the_bits_of_one_in_one_piece(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, family: str, recompute: str
) -> None:
    ops: list[Op] = [long_pass("cross_entropy", 50, 4, 33), STEP]
    layered = begun(new_engine, family=family, recompute=recompute)
    outputs = layered.run(ops).outputs
    whole(monkeypatch)
    at_once = begun(new_engine, family=family, recompute=recompute)
    expected = at_once.run(ops).outputs

    assert same_bits(layered.adapters.state("long"), at_once.adapters.state("long"))
    assert_same_output(outputs["long", 1], expected["long", 1])


@pytest.mark.parametrize(
    ("loss_fn", "spec"),
    [
        ("ppo", replace(SPEC, train_mlp=False)),
        ("gspo", replace(SPEC, train_attn=False, train_mlp=False)),
        variant("ppo", SPEC),
        variant("cross_entropy", replace(SPEC, train_attn=False, train_mlp=False)),
    ],
)
def test_every_loss_and_every_choice_of_targets_has_the_same_bits(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, loss_fn: str, spec: AdapterSpec
) -> None:
    layered = begun(new_engine, spec)
    layered.run([long_pass(loss_fn), STEP])
    whole(monkeypatch)
    at_once = begun(new_engine, spec)
    at_once.run([long_pass(loss_fn), STEP])
    assert same_bits(layered.adapters.state("long"), at_once.adapters.state("long"))


@pytest.mark.numerics
@pytest.mark.parametrize(("family", "trains_mlp"), [("qwen3", True), ("gpt_oss", True), ("granitemoe", False)])
def test_a_datum_that_saves_memory_has_the_same_values(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, family: str, *, trains_mlp: bool
) -> None:
    """Layer inputs are on the host, which moves no bit. Sums over chunks of rows have other last bits."""
    spec = replace(SPEC, train_mlp=trains_mlp)
    ops: list[Op] = [long_pass("cross_entropy", 90, 4), STEP]
    plain = begun(new_engine, spec, family=family)
    theirs = plain.run(ops).outputs["long", 1]
    monkeypatch.setattr(engine_module, "size_micro_batches", lambda *_, **__: Budget(LIMIT, sys.maxsize, 0, LIMIT))
    monkeypatch.setattr(batch_runner, "CHUNK_ROWS", 32)
    chunks, part_of = [], activation_checkpointing.part_of

    def counted(*given: Any) -> Route:
        chunks.append(given)
        return part_of(*given)

    monkeypatch.setattr(activation_checkpointing, "part_of", counted)
    saving = begun(new_engine, spec, family=family)
    ours = saving.run(ops).outputs["long", 1]

    assert len(chunks) >= 3 * 2  # of a layer with 96 rows, twice
    assert isinstance(ours, PassOutput)
    assert isinstance(theirs, PassOutput)
    # An expert's LoRA is a product of fewer rows in a chunk than in the whole datum.
    tolerance = 1e-5 if trains_mlp and saving.facts.expert_choices else 0
    for each, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
        np.testing.assert_allclose(each, expected, rtol=0, atol=tolerance)
    mine, other = (each.adapters.state("long") for each in (saving, plain))
    assert relative_error(mine.m, other.m) < 1e-5
    assert same_bits(mine, other) is not trains_mlp
    assert plain.facts.numerics_id != saving.facts.numerics_id


def test_chunks_of_an_mlp_take_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of all tensors that autograd keeps at a time."""
    wide = {"head_dim": 16, "intermediate_size": 1024}
    monkeypatch.setitem(tiny_models.EVERY, "wide", ("Qwen3Config", wide))
    model = tiny_models.build_tiny("wide", tmp_path)
    peaks = []
    for save_tokens in (sys.maxsize, LIMIT):
        sized = Budget(LIMIT, 0, save_tokens=save_tokens)
        monkeypatch.setattr(engine_module, "size_micro_batches", lambda *_, at=sized, **__: at)
        monkeypatch.setattr(batch_runner, "CHUNK_ROWS", 32)
        engine = Engine.load(str(model), head_chunk_rows=32)
        engine.run([Create("long", 0, SPEC)])
        Kept.live = Kept.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            output = engine.run([long_pass("cross_entropy", 256)]).outputs["long", 1]
        assert isinstance(output, PassOutput)
        peaks.append(Kept.peak)
    assert peaks[1] < 0.5 * peaks[0], peaks


class Kept:
    """A tensor that autograd keeps, and the bytes of all of them."""

    live = peak = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Kept.live += tensor.nbytes
        Kept.peak = max(Kept.peak, Kept.live)

    def __del__(self) -> None:
        Kept.live -= self.tensor.nbytes


def test_a_long_datum_without_memory_runs_again_and_saves_memory(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums then have other last bits, and the next one does not fail first."""
    engine, begin = begun(new_engine, recompute="always"), BatchRunner.start_long
    kinds: list[type] = []

    class Full(list[torch.Tensor]):
        @override
        def append(self, _: torch.Tensor) -> None:
            raise torch.OutOfMemoryError

    def begin_full(*given: Any) -> StartedLong:
        started = begin(*given)
        kinds.append(type(started.slice.inputs))
        if isinstance(started.slice.inputs, list):
            started.slice.inputs = Full()
        return started

    monkeypatch.setattr(BatchRunner, "start_long", begin_full)
    exact = []
    for _ in range(2):
        output = engine.run([long_pass()])
        assert isinstance(output.outputs["long", 1], PassOutput)
        exact.append(output.is_exact)
    assert kinds == [list, HostInputs, HostInputs]
    assert exact == [False, True]


@pytest.mark.parametrize("recompute", ["always", "never"])  # the datum then saves memory, or fails
def test_tokens_count_once_if_memory_runs_out_in_a_later_cycle(new_engine: NewEngine, recompute: str) -> None:
    engine, op = begun(new_engine, recompute=recompute), long_pass()
    cycles = [_cycle(engine, [op]) for _ in range(3)]
    (state,) = engine.open_passes._state_by_run.values()

    def run_out() -> Yielding[HeadResult]:
        yield from ()
        raise torch.OutOfMemoryError

    assert state.long
    state.long = replace(state.long, work=run_out())
    while op.id not in cycles[-1].outputs:
        cycles.append(_cycle(engine, [op]))

    assert isinstance(cycles[-1].outputs[op.run, op.seq], PassOutput) == (recompute == "always")
    assert sum(cycle.tokens for cycle in cycles) <= 50
    assert all(0 <= cycle.tokens <= cycle.padded_tokens for cycle in cycles)
    assert all(cycle.divided[op.run, op.seq].now >= 0 for cycle in cycles)
    if recompute == "always":
        assert sum(cycle.tokens for cycle in cycles) == 50
        assert sum(cycle.padded_tokens for cycle in cycles) == 64


@pytest.mark.parametrize("needs_grad", [True, False])
def test_there_is_a_yield_point_after_each_layer_in_both_directions(new_engine: NewEngine, needs_grad: bool) -> None:
    engine, yields = begun(new_engine), []
    drive(engine.cycle([long_pass(needs_grad=needs_grad)]), lambda: yields.append(1))
    # The head is one chunk here, with one yield point after it and one after the norm.
    assert len(yields) >= (2 * LAYERS if needs_grad else LAYERS)
    assert len(yields) <= (2 * LAYERS + 3 if needs_grad else LAYERS + 2)


def others(cycle: int) -> list[Op]:
    return [op for tenant in MIX[:2] for op in tenant.ops(cycle)]


@pytest.mark.parametrize(
    ("recompute", "needs_grad", "adapter_bytes"),  # every pair of two settings
    [("never", True, 1), variant("always", True, None), variant("never", False, None), variant("always", False, 1)],
)
def test_a_datum_suspended_after_every_layer_has_the_same_bits(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, recompute: str, needs_grad: bool, adapter_bytes: int | None
) -> None:
    """Whole cycles of other runs with their steps run in between. Adapters are offloaded and restored."""
    settings: dict[str, Any] = {"recompute": recompute, "adapter_bytes": adapter_bytes}
    stopped = begun(new_engine, **settings)
    op = long_pass("cross_entropy", 50, 4, 33, needs_grad=needs_grad)
    rows: list[int] = []
    cycles = iter(range(40))
    while ("long", 1) not in (output := _cycle(stopped, [op])).outputs:
        cycle = next(cycles)
        rows.append(output.divided["long", 1].in_all)
        _cycle(stopped, others(cycle), allowances=False)
    assert len(rows) > 2 * LAYERS
    assert rows == sorted(rows)
    assert len(set(rows)) == len(rows), "each cycle takes it further"
    stopped.run([STEP])

    whole(monkeypatch)
    alone = begun(new_engine, **settings)
    expected = alone.run([op, STEP])
    assert_same_output(output.outputs["long", 1], expected.outputs["long", 1])
    assert same_bits(stopped.adapters.state("long"), alone.adapters.state("long"))


def _cycle(engine: Engine, ops: list[Op], *, allowances: bool = True) -> Any:
    limits = {op.id: 1 for op in ops if isinstance(op, Pass)} if allowances else {}
    return drive(engine.cycle(ops, limits, lambda: allowances), lambda: None)[0]


def test_two_suspended_datums_both_finish(new_engine: NewEngine) -> None:
    engine, alone = begun(new_engine), begun(new_engine)
    for each in (engine, alone):
        each.run([Create("other", 0, replace(SPEC, seed=9))])
    first, second = long_pass(), replace(long_pass(), run="other")
    open_ops: list[Op] = [first, second]
    finished = []
    for _ in range(60):
        output = _cycle(engine, open_ops)
        finished += [op.run for op in open_ops if op.id in output.outputs]
        open_ops = [op for op in open_ops if op.id not in output.outputs]
        if not open_ops:
            break
    assert sorted(finished) == ["long", "other"]
    alone.run([first, second])
    for run in finished:
        assert same_bits(engine.adapters.state(run), alone.adapters.state(run))


def test_a_long_datum_with_nan_fails_alone(new_engine: NewEngine) -> None:
    engine = begun(new_engine)
    before = engine.adapters.state("long")
    bad = long_pass()
    bad.datums[0].inputs["weights"][40] = np.nan
    output = engine.run([bad]).outputs["long", 1]
    assert not isinstance(output, PassOutput)
    after = engine.adapters.state("long")
    assert torch.equal(before.weights, after.weights)
    assert not after.grads_pending


def test_restoring_a_run_drops_its_suspended_datum(new_engine: NewEngine) -> None:
    engine, alone = begun(new_engine), begun(new_engine)
    state = engine.adapters.state("long")
    for _ in range(3):
        _cycle(engine, [long_pass()])
    engine.adapters.restore("long", state)
    for each in (engine, alone):
        each.run([long_pass(), STEP])
    assert same_bits(engine.adapters.state("long"), alone.adapters.state("long"))


def four(engine: Engine) -> list[Pass]:
    """Make four runs. Return a long pass of each."""
    engine.run([Create(f"run-{number}", 0, replace(SPEC, seed=number)) for number in range(4)])
    return [replace(long_pass(), run=f"run-{number}") for number in range(4)]


def suspended(engine: Engine) -> int:
    return sum(state.long is not None for state in engine.open_passes._state_by_run.values())


def test_the_number_of_suspended_datums_is_limited_and_all_finish(new_engine: NewEngine) -> None:
    engine, alone = begun(new_engine), begun(new_engine)
    ops: list[Op] = [*four(engine)]
    four(alone)
    most = 0
    for turn in range(400):
        if not ops:
            break
        chosen = ops[turn % len(ops)]  # one pass per cycle, as with many runs and a small budget
        output = _cycle(engine, [chosen])
        most = max(most, suspended(engine))
        if (chosen.run, chosen.seq) in output.outputs:
            ops.remove(chosen)
    assert ops == []
    assert most == MAX_SUSPENDED
    alone.run([replace(long_pass(), run=f"run-{number}") for number in range(4)])
    for number in range(4):
        run = f"run-{number}"
        assert same_bits(engine.adapters.state(run), alone.adapters.state(run))


def test_a_datum_runs_to_its_end_if_the_suspended_ones_are_inactive(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begun(new_engine)
    first, second, third, _ = four(engine)
    for op in (first, second):
        _cycle(engine, [op])
    assert not _cycle(engine, [third]).outputs
    monkeypatch.setattr("cotrain_workers.engine.training.forward_backward.RECENT_S", -1.0)
    assert ("run-2", 1) in _cycle(engine, [third]).outputs


def test_a_dropped_run_frees_its_datum_without_the_garbage_collector(new_engine: NewEngine) -> None:
    engine = begun(new_engine)
    _cycle(engine, [long_pass()])
    (kept,) = engine._forward_backward._long
    held = weakref.ref(kept)
    del kept
    gc.disable()
    try:
        engine.adapters.drop("long")
        assert held() is None
    finally:
        gc.enable()
