"""Running out of memory in the middle of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.coordination import Alone
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora import segmented as lora
from cotrain_workers.engine.ops import Create, Failure, Op, OptimStep, Pass, PassOutput, UpcomingBatch
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training import micro_batches
from cotrain_workers.engine.training.pass_outputs import memory_failure
from tests.support.draws import variant
from tests.support.training import MIX, NewEngine, random_datum, relative_error, same_bits


def passes(cycle: int) -> list[Op]:
    return [op for tenant in MIX for op in tenant.ops(cycle) if not isinstance(op, OptimStep)]


def limit_rows(engine: Engine, most: int, error: Exception | None = None) -> Callable[[], None]:
    """Make the base model run out of memory on rows of more than `most` tokens, until the returned function is called."""

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > most:
            raise error or torch.OutOfMemoryError()

    return engine._base.backbone.register_forward_pre_hook(refuse, with_kwargs=True).remove


def assert_same_states(ours: Engine, theirs: Engine) -> None:
    for tenant in MIX:
        assert same_bits(ours.adapters.state(tenant.run), theirs.adapters.state(tenant.run)), tenant.run


def test_running_out_of_memory_in_a_group_is_an_error(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    limit_rows(engine, 128)
    monkeypatch.setattr(Alone, "sharding", "fsdp2/2")

    with pytest.raises(torch.OutOfMemoryError):
        engine.run(passes(0))


def test_a_micro_batch_too_large_for_memory_is_halved(new_engine: NewEngine) -> None:
    small, large = new_engine(), new_engine()
    limit_rows(small, 128)

    out = small.run(passes(0))
    expected = large.run(passes(0))

    assert out.forwards > expected.forwards == 1
    assert out.tokens == expected.tokens
    assert_same_states(small, large)


def run_out_in_backward(monkeypatch: pytest.MonkeyPatch, failing_call: int) -> list[int]:
    """Make one gradient product of the base model's modules run out of memory. Return a call counter."""
    calls, add_product = [0], lora.add_product

    def once(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == failing_call:
            raise torch.OutOfMemoryError
        add_product(*args)

    monkeypatch.setattr(lora, "add_product", once)
    return calls


@pytest.mark.parametrize("failing_call", [1, variant(20), 150])
def test_running_out_of_memory_in_backward_leaves_no_partial_sums(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    troubled, untroubled = new_engine(), new_engine()
    untroubled.run(passes(0))

    calls = run_out_in_backward(monkeypatch, failing_call)
    out = troubled.run(passes(0))

    assert calls[0] > failing_call
    assert out.outputs.keys() == {op.id for op in passes(0)}
    assert_same_states(troubled, untroubled)


def test_an_op_keeps_the_slices_of_earlier_micro_batches(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubled, untroubled = (new_engine(micro_batch_tokens=64) for _ in range(2))
    rng = np.random.default_rng(0)
    large, small = (
        [random_datum(rng, "cross_entropy", length) for length in lengths] for lengths in ((50, 50, 10), (3,))
    )
    ops: list[Op] = []  # micro-batches of 50 and of 60 + 3 tokens
    for run, datums in (("large", large), ("small", small)):
        ops.append(Create(run, 0, AdapterSpec(4, seed=0)))
        ops.append(Pass(run, 1, datums, "cross_entropy", {}, needs_grad=True))
    assert untroubled.run(ops).forwards == 2

    products_of_first = 2 * 14  # A and B of each module but the head
    calls = run_out_in_backward(monkeypatch, products_of_first + 5)
    out = troubled.run(ops)

    assert out.forwards == 4
    assert calls[0] == 5 + 3 * products_of_first
    for run in ("large", "small"):
        assert same_bits(troubled.adapters.state(run), untroubled.adapters.state(run))


@pytest.mark.parametrize(
    ("lengths", "forwards"),
    [([50, 50, 10], 4), ([50, 200], 4)],  # the second micro-batch in halves; a long datum again
)
def test_running_out_of_memory_for_the_copy_of_a_gradient_loses_no_slice(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, lengths: Sequence[int], forwards: int
) -> None:
    troubled, untroubled = (new_engine(micro_batch_tokens=64) for _ in range(2))
    spec = AdapterSpec(4, seed=0)
    ops = [*one_op("large", lengths, spec), *one_op("small", [3], spec)]
    untroubled.run(ops)
    size = untroubled.adapters.state("large").grads.numel()
    clone, failures = torch.Tensor.clone, iter([torch.OutOfMemoryError()])

    def full_once(self: torch.Tensor) -> torch.Tensor:
        if self.numel() == size:
            for error in failures:
                raise error
        return clone(self)

    monkeypatch.setattr(torch.Tensor, "clone", full_once)
    out = troubled.run(ops)

    assert out.forwards == forwards
    for run in ("large", "small"):
        assert same_bits(troubled.adapters.state(run), untroubled.adapters.state(run))


def one_op(run: str, lengths: Sequence[int], spec: AdapterSpec) -> list[Op]:
    rng = np.random.default_rng([*run.encode()])
    datums = [random_datum(rng, "cross_entropy", length) for length in lengths]
    return [Create(run, 0, spec), Pass(run, 1, datums, "cross_entropy", {}, needs_grad=True)]


def test_a_size_that_fitted_is_remembered(new_engine: NewEngine) -> None:
    small, large = new_engine(), new_engine()
    limit_rows(small, 128)
    small.run(passes(0))
    halvings = small.halvings
    assert 0 < small.safe_tokens <= 128 < large.safe_tokens
    large.run(passes(0))

    later = [op for op in passes(1) if not isinstance(op, Create)]
    small.run(later)
    large.run(later)

    assert small.halvings == halvings > large.halvings == 0
    assert_same_states(small, large)


def test_a_size_that_did_not_fit_is_tried_again(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first_wait = 3
    monkeypatch.setattr(micro_batches, "FIRST_WAIT", first_wait)
    troubled, untroubled = new_engine(), new_engine()
    free = limit_rows(troubled, 128)
    troubled.run(passes(0))
    untroubled.run(passes(0))
    free()
    lowered = troubled.safe_tokens
    create, small = one_op("small", [9], AdapterSpec(4, seed=0))
    troubled.run([create])
    for _ in range(first_wait):
        assert troubled.safe_tokens == lowered
        troubled.run([small])

    assert troubled.safe_tokens == 2 * lowered
    for _ in range(7 * first_wait):
        troubled.run([small])
    assert troubled.safe_tokens == untroubled.safe_tokens
    later = [op for op in passes(1) if not isinstance(op, Create)]
    assert troubled.run(later).forwards == untroubled.run(later).forwards == 1
    assert_same_states(troubled, untroubled)


def test_an_op_too_large_for_memory_is_split_between_its_datums(new_engine: NewEngine) -> None:
    small, large = new_engine(), new_engine()
    limit_rows(small, 128)
    spec = AdapterSpec(4, seed=0)
    ops = [*one_op("wide", [60, 50, 70, 40, 80], spec), *one_op("narrow", [9, 8], spec)]

    out, expected = small.run(ops), large.run(ops)

    assert (small.cut_slices > 0, large.cut_slices) == (True, 0)
    assert same_bits(small.adapters.state("narrow"), large.adapters.state("narrow"))
    ours, theirs = out.outputs["wide", 1], expected.outputs["wide", 1]
    assert isinstance(ours, PassOutput)
    assert isinstance(theirs, PassOutput)
    assert all(map(np.array_equal, ours.logprobs, theirs.logprobs))
    grads = [engine.adapters.state("wide").grads for engine in (small, large)]
    assert relative_error(*grads) < 1e-5  # fp32 sums in another order


@pytest.mark.parametrize(
    ("lengths", "is_first", "gradient_waits"),
    [([200], True, False), ([30, 200, 40], False, True), ([30, 40, 200], True, True), ([30, 40, 200], False, False)],
)
def test_a_datum_too_large_for_memory_fails_its_op_alone(
    new_engine: NewEngine, lengths: list[int], is_first: bool, gradient_waits: bool
) -> None:
    small, alone = new_engine(), new_engine()
    limit_rows(small, 128)
    spec = AdapterSpec(4, seed=0)
    failing, others = one_op("wide", lengths, spec), one_op("narrow", [9, 8], spec)
    earlier = failing[:1]
    if gradient_waits:
        earlier += one_op("wide", [20], spec)[1:]
    later = replace(failing[1], seq=2)
    for engine in (small, alone):
        engine.run(earlier)

    out = small.run([later, *others] if is_first else [*others, later])
    alone.run(others)

    assert out.outputs["wide", 2] == memory_failure(200)
    assert memory_failure(200).category == "server"
    for run in ("wide", "narrow"):
        assert same_bits(small.adapters.state(run), alone.adapters.state(run))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        variant(RuntimeError("DefaultCPUAllocator: can't allocate memory: …")),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=str,
)
def test_running_out_of_other_memory_is_handled_alike(new_engine: NewEngine, error: Exception) -> None:
    small, large = new_engine(), new_engine()
    limit_rows(small, 128, error)
    small.run(passes(0))
    large.run(passes(0))
    assert small.halvings > 0
    assert_same_states(small, large)


def test_another_error_is_not_handled_as_running_out_of_memory(new_engine: NewEngine) -> None:
    engine = new_engine()
    limit_rows(engine, 0, RuntimeError("the device is on fire"))
    with pytest.raises(RuntimeError, match="on fire"):
        engine.run(MIX[0].ops(0)[:2])


@pytest.mark.parametrize("micro_batch_tokens", [8192, 64])
def test_the_host_reads_the_results_of_a_wave_once(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, micro_batch_tokens: int
) -> None:
    engine, copies = new_engine(micro_batch_tokens=micro_batch_tokens), []
    to_host = torch.Tensor.cpu

    def noted(self: torch.Tensor) -> torch.Tensor:
        copies.append(self.shape)
        return to_host(self)

    def never(self: torch.Tensor) -> None:
        raise AssertionError("the host waits for the device")

    engine.run(passes(0)[:1])
    monkeypatch.setattr(torch.Tensor, "cpu", noted)
    for name in ("item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, never)
    out = engine.run(passes(0)[1:4])

    assert out.forwards == (1 if micro_batch_tokens == 8192 else 2)
    assert len(copies) == 1


def test_a_non_finite_pass_leaves_the_others_of_its_run(new_engine: NewEngine) -> None:
    together, without = new_engine(), new_engine()
    create, given = one_op("run", [9], AdapterSpec(4, seed=0))
    assert isinstance(given, Pass)
    first, last = given, replace(given, seq=3)
    (datum,) = given.datums
    weights = np.full_like(datum.inputs["weights"], np.inf)
    bad = replace(given, seq=2, datums=[replace(datum, inputs={**datum.inputs, "weights": weights})])

    for order in ([bad, first, last], [first, bad, last]):
        for engine in (together, without):
            engine.adapters.drop("run")
        out = together.run([create, *order])
        without.run([create, first, last])

        failed = [key for key, each in out.outputs.items() if isinstance(each, Failure)]
        assert failed == [("run", 2)]
        assert same_bits(together.adapters.state("run"), without.adapters.state("run"))
        assert together.adapters.state("run").grads_pending


def test_sparing_memory_changes_no_bit(new_engine: NewEngine) -> None:
    spares, alone = new_engine(), new_engine()
    spares.spare_memory(64)
    assert spares.safe_tokens == 32
    assert spares.recomputes
    few, many = spares.run(passes(0)), alone.run(passes(0))
    assert few.forwards > many.forwards
    assert_same_states(spares, alone)


def test_an_op_with_smaller_slices_reports_inexact_bits(new_engine: NewEngine) -> None:
    engine, whole = new_engine(), new_engine()
    create, whole_pass = one_op("wide", [60, 50, 70], AdapterSpec(4, seed=0))
    assert isinstance(whole_pass, Pass)
    sizes: list[UpcomingBatch] = []

    def watch(batch: UpcomingBatch) -> AbstractContextManager[None]:
        sizes.append(batch)
        return nullcontext()

    engine.watch_micro_batches(watch)
    engine.spare_memory(180)
    out = engine.run([create, replace(whole_pass, slice_tokens=90)])
    expected = whole.run([create, whole_pass])
    assert [(each.largest, each.tokens, each.longest) for each in sizes] == [
        (("wide", 1), 60, 60),
        (("wide", 1), 50, 50),
        (("wide", 1), 70, 70),
    ]
    assert (out.is_exact, expected.is_exact) == (False, True)
    grads = [each.adapters.state("wide").grads for each in (engine, whole)]
    assert relative_error(*grads) < 1e-5
