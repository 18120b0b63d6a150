from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.ops import Create, CreateOutput, Failure, Op, OptimStep, Pass, PassOutput, StepOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.training import NewEngine, Tenant, random_datum, relative_error, same_bits

LOSS_BY_TENANT = ("cross_entropy", "ppo", "gspo", "cispo", "dro", "importance_sampling")
EIGHT = tuple(
    Tenant(f"run-{at}", AdapterSpec(2**at % 15 or 1, seed=at), LOSS_BY_TENANT[at % 6], (3 + at, 11)) for at in range(8)
)
SPEC = AdapterSpec(4, seed=0)
STEP = OptimStep("a", 9, 1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)


def pass_of(run: str, seq: int, *lengths: int, needs_grad: bool = True, seed: int = 0) -> Pass:
    rng = np.random.default_rng(seed)
    datums = [random_datum(rng, "cross_entropy", length) for length in lengths]
    return Pass(run, seq, datums, "cross_entropy", {}, needs_grad)


def test_a_cycle_of_eight_tenants_runs_the_base_model_once(new_engine: NewEngine) -> None:
    engine = new_engine()
    calls = []
    engine._base.backbone.register_forward_hook(lambda *_: calls.append(1))

    out = engine.run([op for tenant in EIGHT for op in tenant.ops(0)])

    assert len(calls) == out.forwards == engine.base_forwards == 1
    assert not [answer for answer in out.outputs.values() if isinstance(answer, Failure)]
    assert out.tokens <= out.padded_tokens < out.tokens + 32


def test_several_micro_batches_equal_one(new_engine: NewEngine) -> None:
    one, several = new_engine(), new_engine(micro_batch_tokens=48)
    ops = [op for tenant in EIGHT for op in tenant.ops(0) if not isinstance(op, OptimStep)]

    assert one.run(ops).forwards == 1
    assert several.run(ops).forwards > 5

    for tenant in EIGHT:
        ours, theirs = (several.adapters.state(tenant.run).grads, one.adapters.state(tenant.run).grads)
        assert relative_error(ours, theirs) < 1e-6  # other slices, another order of summation


def test_an_op_of_several_slices_equals_itself_alone(new_engine: NewEngine) -> None:
    together, alone = new_engine(micro_batch_tokens=64), new_engine(micro_batch_tokens=64)
    large: list[Op] = [Create("large", 0, SPEC), pass_of("large", 1, *range(30, 40))]
    small: list[Op] = [Create("small", 0, SPEC), pass_of("small", 1, 50, seed=1)]

    together.run([*small, *large])
    alone.run(large)

    assert same_bits(together.adapters.state("large"), alone.adapters.state("large"))


def test_a_forward_returns_the_logprobs_of_forward_backward_and_changes_no_state(new_engine: NewEngine) -> None:
    engine = new_engine()
    trained, only_read = pass_of("a", 1, 9, 20), pass_of("a", 2, 9, 20, needs_grad=False)
    out = engine.run([Create("a", 0, SPEC), trained, only_read]).outputs
    before = engine.adapters.state("a")
    again = engine.run([replace(only_read, seq=3)]).outputs["a", 3]

    assert same_bits(engine.adapters.state("a"), before)
    assert isinstance(again, PassOutput)
    backward, forward = out["a", 1], out["a", 2]
    assert isinstance(backward, PassOutput)
    assert isinstance(forward, PassOutput)
    assert backward.loss_sum == forward.loss_sum
    for ours, theirs in zip(backward.logprobs, forward.logprobs, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_forward_runs_without_a_graph_and_without_a_cache(new_engine: NewEngine) -> None:
    """With a cache, transformers silently ignores the packing."""
    engine = new_engine()
    seen = []
    engine._base.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((torch.is_grad_enabled(), kwargs["use_cache"])), with_kwargs=True
    )

    engine.run([Create("a", 0, SPEC), pass_of("a", 1, 9, needs_grad=False)])
    engine.run([pass_of("a", 2, 9)])

    assert seen == [(False, False), (True, False)]


def test_an_overflowing_gradient_is_discarded_though_the_loss_is_finite(new_engine: NewEngine) -> None:
    engine, expected = new_engine(), new_engine()
    create = Create("a", 0, AdapterSpec(1, seed=0))  # the gradient is scaled by alpha / rank = 32
    good = pass_of("a", 1, 5, 6)
    huge = [replace(d, inputs={**d.inputs, "weights": np.full(len(d.tokens), 2e37, np.float32)}) for d in good.datums]

    out = engine.run([create, good, replace(good, seq=2, datums=huge)]).outputs
    forward = engine.run([replace(good, seq=3, datums=huge, needs_grad=False)]).outputs["a", 3]
    expected.run([create, good])

    assert isinstance(forward, PassOutput)
    assert np.isfinite(forward.loss_sum)
    assert isinstance(out["a", 2], Failure)
    assert same_bits(engine.adapters.state("a"), expected.adapters.state("a"))


def test_gradients_are_summed_until_the_step(new_engine: NewEngine) -> None:
    engine, other = new_engine(), new_engine()
    first, second = pass_of("a", 1, 5, 6), pass_of("a", 2, 7, seed=1)
    together = replace(first, datums=[*first.datums, *second.datums])

    engine.run([Create("a", 0, SPEC), first])
    engine.run([second])
    other.run([Create("a", 0, SPEC), together])

    assert relative_error(engine.adapters.state("a").grads, other.adapters.state("a").grads) < 1e-6
    assert engine.adapters.state("a").grads_pending
    engine.run([STEP])
    after = engine.adapters.state("a")
    assert not after.grads_pending
    assert not after.grads.any()
    assert after.step == 1


def test_a_fresh_adapter_returns_the_results_of_the_base_model(new_engine: NewEngine) -> None:
    engine = new_engine()
    specs = (SPEC, AdapterSpec(16, seed=5, train_attn=False))

    out = engine.run(
        [op for run, spec in zip("ab", specs, strict=True) for op in (Create(run, 0, spec), pass_of(run, 1, 12))]
    ).outputs

    ours_of, theirs_of = out["a", 1], out["b", 1]
    assert isinstance(ours_of, PassOutput)
    assert isinstance(theirs_of, PassOutput)
    for ours, theirs in zip(ours_of.logprobs, theirs_of.logprobs, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_base_model_is_never_changed(new_engine: NewEngine) -> None:
    engine = new_engine(tied=True)
    before = {name: p.clone() for name, p in engine._base.backbone.named_parameters()}

    for cycle in range(2):
        engine.run([op for tenant in EIGHT for op in tenant.ops(cycle)])

    assert engine._base.head_weight is engine._base.backbone.get_parameter("embed_tokens.weight")
    for name, parameter in engine._base.backbone.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.grad is None


def test_a_step_without_a_gradient_is_a_step_with_zeros(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])
    before = engine.adapters.state("a")

    output = engine.run([replace(STEP, weight_decay=0.5)]).outputs["a", 9]

    assert output == StepOutput(0.0)
    after = engine.adapters.state("a")
    torch.testing.assert_close(after.weights, before.weights * (1 - 1e-2 * 0.5))
    assert after.step == 1


def test_a_pass_without_datums_is_answered(new_engine: NewEngine) -> None:
    out = new_engine().run([Create("a", 0, SPEC), pass_of("a", 1)])

    assert out.outputs["a", 1] == PassOutput([], 0.0)
    assert out.forwards == 0


@pytest.mark.parametrize(
    ("op", "message", "category"),
    [
        (pass_of("ghost", 1, 3), "its creation failed", "user"),
        (replace(STEP, run="ghost", seq=1), "its creation failed", "user"),
        (replace(STEP, seq=1, eps=0.0), "eps=0.0 is out of range", "user"),
        (Create("a", 1, SPEC), "exists already", "server"),
        (Create("b", 1, AdapterSpec(0, seed=0)), r"Rank 0 is outside 1\.\.64", "user"),
        (Create("b", 1, AdapterSpec(4, 0, False, False, False)), "Nothing to train", "user"),
        (replace(pass_of("a", 1, 3), loss_fn="mse"), "Unknown loss_fn 'mse'", "user"),
    ],
)
def test_an_impossible_op_fails_alone(
    new_engine: NewEngine, op: Pass | OptimStep | Create, message: str, category: str
) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])

    out = engine.run([op, Create("c", 0, SPEC), pass_of("c", 1, 4)]).outputs

    failure = out[op.run, op.seq]
    assert isinstance(failure, Failure)
    assert message.replace("\\", "") in failure.message
    assert failure.category == category
    assert isinstance(out["c", 1], PassOutput)


def test_a_gradient_that_overflows_in_the_sum_is_discarded_at_the_step(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC), pass_of("a", 1, 4)])
    state = engine.adapters.state("a")
    engine.adapters.restore("a", replace(state, grads=torch.full_like(state.grads, torch.inf)))

    output = engine.run([STEP]).outputs["a", 9]

    assert output == Failure("Gradient is not finite (seq 9); it was discarded.", "user", "not_finite")
    after = engine.adapters.state("a")
    assert torch.equal(after.weights, state.weights)
    assert (after.step, after.grads_pending) == (0, False)


def test_a_restored_run_continues_with_the_same_bits(new_engine: NewEngine) -> None:
    tenant, other = EIGHT[0], new_engine()
    engine = new_engine()
    engine.run(tenant.ops(0))
    engine.run(tenant.ops(1)[:-1])  # a gradient is pending
    state = engine.adapters.state(tenant.run)

    other.adapters.restore(tenant.run, state)
    assert tenant.run in other.adapters
    assert same_bits(other.adapters.state(tenant.run), state)
    for each in (engine, other):
        each.run([tenant.ops(1)[-1], *tenant.ops(2)])

    assert same_bits(engine.adapters.state(tenant.run), other.adapters.state(tenant.run))


def test_a_state_is_a_copy(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC), pass_of("a", 1, 4)])
    state, digest = engine.adapters.state("a"), engine.adapters.state("a").digest()

    engine.run([STEP])

    assert state.digest() == digest != engine.adapters.state("a").digest()


def test_a_dropped_run_is_removed(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])

    engine.adapters.drop("a")
    engine.adapters.drop("a")

    assert "a" not in engine.adapters
    with pytest.raises(KeyError):
        engine.adapters.state("a")


def test_a_state_of_another_model_is_refused(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])
    state = engine.adapters.state("a")

    with pytest.raises(ValueError, match="values, not"):
        engine.adapters.restore("b", replace(state, weights=state.weights[:-16]))
    assert "b" not in engine.adapters


def test_the_facts_describe_the_model(new_engine: NewEngine) -> None:
    facts = new_engine().facts

    assert facts.architecture == "Qwen3ForCausalLM"
    assert (facts.vocab_size, facts.context_length, facts.max_rank) == (128, 512, 64)
    assert facts.modules_by_family == {"attn": 8, "mlp": 6, "unembed": 1}
    assert facts.num_parameters == 115_136


def test_another_thread_count_or_size_changes_the_numerics_id(new_engine: NewEngine) -> None:
    one = new_engine().facts.numerics_id

    assert new_engine().facts.numerics_id == one
    assert new_engine(micro_batch_tokens=64).facts.numerics_id != one
    torch.set_num_threads(2)
    try:
        assert new_engine().facts.numerics_id != one
    finally:
        torch.set_num_threads(1)


def test_created_runs_report_their_size(new_engine: NewEngine) -> None:
    out = new_engine().run([Create("a", 0, AdapterSpec(3, 0, train_attn=False, train_mlp=False))])

    assert out.outputs["a", 0] == CreateOutput(3 * (64 + 128))
