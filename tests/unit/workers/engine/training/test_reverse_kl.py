"""Reverse KL in the engine: compared with a dense oracle, among other runs, and after errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model.unembedding import Projection
from cotrain_workers.engine.ops import (
    Create,
    CycleOutput,
    Failure,
    HostWeights,
    KlDatum,
    Op,
    OptimStep,
    Pass,
    ReverseKl,
)
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.heads import KlHead, Referred
from tests.support.draws import variant
from tests.support.kl import SPEC, found, kl_datum, kl_datums, kl_parity, random_weights, started
from tests.support.open_passes import assert_same_output
from tests.support.training import MIX, ModelFolder, NewEngine, random_datum, same_bits

WHOLE, NO_HEAD = AdapterSpec(3, seed=21), AdapterSpec(8, seed=22, train_unembed=False)


def op_of(run: str, seq: int, reference: HostWeights | None, *, seed: int = 0, temperature: float = 1.0) -> ReverseKl:
    return ReverseKl(run, seq, kl_datums(seed), reference, temperature)


def assert_same_answers(run: str, mixed: CycleOutput, alone: CycleOutput) -> None:
    for (owner, seq), expected in alone.outputs.items():
        if owner == run:
            assert_same_output(mixed.outputs[run, seq], expected)


@pytest.mark.parametrize(
    ("family", "tied", "temperature", "reference"),
    [
        ("qwen3", False, 1.0, WHOLE),
        ("qwen3", True, 0.6, NO_HEAD),
        ("qwen3", False, 2.5, None),
        ("gemma2", True, 1.7, WHOLE),  # caps its logits
    ],
)
def test_a_reverse_kl_equals_a_dense_fp64_oracle(
    new_engine: NewEngine,
    model_folder: ModelFolder,
    family: str,
    temperature: float,
    reference: AdapterSpec | None,
    *,
    tied: bool,
) -> None:
    """1e-5 is the fp32 precision of sums over a vocabulary, here and in every other parity test."""
    engine = started(new_engine(family, tied=tied, head_chunk_rows=7))
    weights = random_weights(reference, engine.adapters.layout_of) if reference else None

    parity = kl_parity(engine, model_folder(family, tied=tied), op_of("a", 1, weights, temperature=temperature))

    assert parity.loss_error < 1e-5
    assert parity.sum_error < 1e-5
    assert parity.gradient_error < 1e-5


def test_an_fp64_reverse_kl_equals_the_oracle_in_fp64(new_engine: NewEngine, model_folder: ModelFolder) -> None:
    engine = started(new_engine(dtype=torch.float64))
    op = op_of("a", 1, random_weights(WHOLE, engine.adapters.layout_of), temperature=0.8)

    assert kl_parity(engine, model_folder(), op).gradient_error < 1e-11


def test_its_gradient_on_a_bf16_base_has_the_direction_of_that_on_fp32(new_engine: NewEngine) -> None:
    wide, narrow = started(new_engine()), started(new_engine(dtype=torch.bfloat16))
    for engine in (wide, narrow):
        output = engine.run([op_of("a", 1, random_weights(WHOLE, engine.adapters.layout_of))]).outputs["a", 1]
        assert {losses.dtype for losses in found(output).losses} == {np.dtype(np.float32)}

    cosine = torch.cosine_similarity(wide.adapters.state("a").grads, narrow.adapters.state("a").grads, dim=0)
    assert float(cosine) > 0.99


def test_the_divergence_of_a_run_from_itself_is_zero(new_engine: NewEngine) -> None:
    engine = started(new_engine())
    itself = random_weights(SPEC, engine.adapters.layout_of)
    same = [replace(datum, reference=datum.tokens) for datum in kl_datums(3)]

    output = found(engine.run([ReverseKl("a", 1, same, itself, 0.9)]).outputs["a", 1])

    assert output.loss_sum == output.kl_sum == 0.0
    assert not engine.adapters.state("a").grads.any()


def test_a_target_of_weight_zero_is_not_counted(new_engine: NewEngine) -> None:
    engine, expected = started(new_engine()), started(new_engine())
    whole = kl_datum(np.random.default_rng(5), 6, 9, 12)
    weights = np.array([0] * 8 + [1, 2, 0.5, 3], np.float32)
    reference = random_weights(WHOLE, engine.adapters.layout_of)

    one = ReverseKl("a", 1, [replace(whole, weights=weights)], reference, 1.0)
    ours = found(engine.run([one]).outputs["a", 1])
    other = replace(one, datums=[replace(whole, weights=weights[8:])])
    theirs = found(expected.run([other]).outputs["a", 1])

    assert ours.weighted_tokens == theirs.weighted_tokens == 4
    np.testing.assert_array_equal(ours.losses[0], np.r_[np.zeros(8, np.float32), theirs.losses[0]])
    assert ours.kl_sum == theirs.kl_sum > 0
    assert same_bits(engine.adapters.state("a"), expected.adapters.state("a"))


def test_targets_of_weight_zero_alone_have_a_gradient_of_zero(new_engine: NewEngine) -> None:
    engine = started(new_engine())
    datum = kl_datum(np.random.default_rng(5), 6, 9, 4)
    nothing = replace(datum, weights=np.zeros(4, np.float32))

    output = found(engine.run([ReverseKl("a", 1, [nothing], None, 1.0)]).outputs["a", 1])

    assert (output.loss_sum, output.weighted_tokens) == (0.0, 0)
    assert not engine.adapters.state("a").grads.any()


def test_its_gradient_is_added_to_that_of_other_passes(new_engine: NewEngine) -> None:
    both, first, second = (started(new_engine()) for _ in range(3))
    rng = np.random.default_rng(1)
    datums = [random_datum(rng, "cross_entropy", length) for length in (9, 20)]
    other = Pass("a", 1, datums, "cross_entropy", {}, needs_grad=True)
    kl = op_of("a", 2, random_weights(WHOLE, both.adapters.layout_of))

    both.run([other, kl])
    first.run([other])
    second.run([replace(kl, seq=1)])

    expected = first.adapters.state("a").grads + second.adapters.state("a").grads
    assert torch.equal(both.adapters.state("a").grads, expected)
    both.run([OptimStep("a", 3, 1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)])
    assert not both.adapters.state("a").grads_pending


def kl_runs(engine: Engine) -> dict[str, list[Op]]:
    """Return runs that learn from references of several kinds, two of them from the same one."""
    shared, own = (random_weights(spec, engine.adapters.layout_of) for spec in (WHOLE, NO_HEAD))
    step = OptimStep("", 3, 1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)
    runs: dict[str, list[Op]] = {}
    for at, reference in enumerate((shared, own, None, shared)):
        run = f"kl-{at}"
        runs[run] = [
            Create(run, 0, AdapterSpec(2 + at, seed=at)),
            op_of(run, 1, reference, seed=at),
            op_of(run, 2, None, seed=9 + at, temperature=0.5),
            replace(step, run=run),
        ]
    return runs


@pytest.mark.parametrize("micro_batch_tokens", [variant(8192), 64])
def test_a_run_among_others_equals_the_run_alone_exactly(new_engine: NewEngine, micro_batch_tokens: int) -> None:
    together, alone = (new_engine(micro_batch_tokens=micro_batch_tokens) for _ in range(2))
    runs = kl_runs(together) | {tenant.run: tenant.ops(0) for tenant in MIX}

    mixed = together.run([op for at in range(5) for ops in runs.values() for op in ops[at : at + 1]])

    for run, ops in runs.items():
        assert_same_answers(run, mixed, alone.run(ops))
        assert same_bits(together.adapters.state(run), alone.adapters.state(run)), run


@pytest.mark.parametrize("poison", ["reference", "run", variant("weights")])
def test_a_reverse_kl_with_nan_fails_alone(new_engine: NewEngine, poison: str) -> None:
    among, alone = new_engine(), new_engine()
    runs = kl_runs(among)
    for engine in (among, alone):
        for run in ("bad", "good"):
            started(engine, run)
    bad = op_of("bad", 1, random_weights(NO_HEAD, among.adapters.layout_of))
    if poison == "reference":
        assert bad.reference is not None
        bad.reference.flat.fill_(np.nan)
    elif poison == "run":
        ruined = among.adapters.state("bad")
        ruined.weights.fill_(np.nan)
        among.adapters.restore("bad", ruined)
    else:
        bad.datums[0].weights[0] = np.nan
    good = op_of("good", 1, random_weights(WHOLE, among.adapters.layout_of))

    mixed = among.run([bad, good, *(op for ops in runs.values() for op in ops)])

    failure = mixed.outputs["bad", 1]
    assert isinstance(failure, Failure)
    assert (failure.category, failure.code) == ("user", "not_finite")
    assert failure.message.startswith("Loss is not finite (seq 1); the gradient was discarded.")
    assert ("load an earlier checkpoint (load_state)" in failure.message) == (poison == "run")
    assert not among.adapters.state("bad").grads_pending
    assert_same_answers("good", mixed, alone.run([good]))
    assert same_bits(among.adapters.state("good"), alone.adapters.state("good"))
    for run, ops in runs.items():
        alone.run(ops)
        assert same_bits(among.adapters.state(run), alone.adapters.state(run)), run


def test_references_of_one_wave_share_a_forward(new_engine: NewEngine) -> None:
    engine = new_engine()
    ops = [op for ops in kl_runs(engine).values() for op in ops]

    cost = engine.run(ops)

    read = [datum for op in ops if isinstance(op, ReverseKl) for datum in op.datums]
    assert cost.forwards == engine.base_forwards == 2
    assert cost.tokens == sum(len(datum.tokens) + len(datum.reference) for datum in read)


def test_long_reference_contexts_fill_at_most_a_micro_batch(new_engine: NewEngine) -> None:
    engine = started(new_engine(micro_batch_tokens=64))
    rng, rows = np.random.default_rng(2), []
    engine._base.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    short = [kl_datum(rng, 1, 30, 2) for _ in range(12)]

    engine.run([ReverseKl("a", 1, short, None, 1.0)])

    assert rows == [*[64] * 6, 32]  # references two at a time, the run all at once


def test_running_out_of_memory_in_a_reference_changes_no_bit(new_engine: NewEngine) -> None:
    troubled, untroubled = new_engine(), new_engine()
    calls: list[int] = []

    def run_out_once(*_: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError

    troubled._base.backbone.register_forward_pre_hook(run_out_once)
    ops = [op for ops in kl_runs(troubled).values() for op in ops]

    troubled.run(ops)
    untroubled.run(ops)

    assert len(calls) == 1 + 4
    for run in kl_runs(troubled):
        assert same_bits(troubled.adapters.state(run), untroubled.adapters.state(run)), run


def test_no_tensor_has_all_rows_times_the_vocabulary() -> None:
    rows, vocab, chunk_rows = 512, 2048, 32
    weight, hidden = torch.randn(vocab, 8), torch.randn(rows, 8)
    referred = Referred(torch.randn(rows, 8), None)
    tokens = np.zeros(rows, np.int64)
    datums = [KlDatum(tokens, tokens, np.ones(rows, np.float32))]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        head = KlHead(weight, None, chunk_rows)
        head.compare(datums, 1.0, None, referred, hidden, torch.empty_like(hidden))

    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2 * chunk_rows * vocab * 4 < rows * vocab * 4


def test_the_backward_of_a_projection_ends_where_that_of_autograd_does() -> None:
    weight, hidden = torch.randn(9, 4).double(), torch.randn(3, 4).double().requires_grad_()
    slope = torch.randn(3, 9).double()
    (expected,) = torch.autograd.grad((3.0 * torch.tanh(hidden @ weight.t() / 3.0)), hidden, slope)
    found = torch.empty(3, 4).double()

    with torch.no_grad():
        projection = Projection(weight, 3.0, None, hidden.detach(), found)
        projection.logits()
        projection.backward(slope.clone())

    torch.testing.assert_close(found, expected)


GOOD = kl_datum(np.random.default_rng(0), 3, 4, 5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; it must be positive and finite."),
        ({"temperature": np.inf}, "temperature is inf; it must be positive and finite."),
        (
            {"datums": [GOOD, replace(GOOD, tokens=np.array([1, 128, 2, 3, 4]))]},
            "Token id 128 at position 1 is outside the vocabulary (0..127) (datum 1).",
        ),
        (
            {"datums": [replace(GOOD, reference=np.array([1, 2, 3, 4, -1]))]},
            "Reference token id -1 at position 4 is outside the vocabulary (0..127) (datum 0).",
        ),
        (
            {"datums": [replace(GOOD, reference=np.zeros(513, np.int64))]},
            "A datum has 1 to 512 tokens, not 513 (datum 0).",
        ),
        (
            {"datums": [KlDatum(np.zeros(2, np.int64), GOOD.reference, GOOD.weights)]},
            "weights has shape [5]; there is room for 1 to 2 targets (datum 0).",
        ),
    ],
)
def test_an_invalid_reverse_kl_is_refused_with_its_position(
    new_engine: NewEngine, change: dict[str, Any], reason: str
) -> None:
    op = ReverseKl("a", 1, [GOOD], None, 1.0)
    engine = started(new_engine())

    answer = engine.run([replace(op, **change)]).outputs["a", 1]

    assert answer == Failure(reason, "user")


def test_a_reference_for_another_base_model_is_refused(new_engine: NewEngine) -> None:
    engine = started(new_engine())
    weights = random_weights(WHOLE, engine.adapters.layout_of)
    foreign = replace(weights, flat=weights.flat[:-16])

    answer = engine.run([op_of("a", 1, foreign)]).outputs["a", 1]

    assert answer == Failure("The reference was made for another base model.", "user")
