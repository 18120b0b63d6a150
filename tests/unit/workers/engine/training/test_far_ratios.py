"""Passes with log-probabilities so different that float32 cannot represent their ratio."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.ops import Create, Failure, OptimStep, Pass, PassOutput, StepOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.draws import variant
from tests.support.training import NewEngine, random_datum

SPEC = AdapterSpec(4, seed=0)


def policy_pass(loss_fn: str, then: float, advantage: float) -> Pass:
    """Return a pass of two datums. One token of the second has another log-probability at sampling."""
    rng = np.random.default_rng(4)
    datums = [random_datum(rng, loss_fn, length) for length in (3, 5)]
    datums[1].inputs["logprobs"][2], datums[1].inputs["advantages"][2] = then, advantage
    return Pass("a", 1, datums, loss_fn, {}, needs_grad=True)


@pytest.mark.parametrize(("loss_fn", "advantage"), [("importance_sampling", 1.0), ("ppo", -1.0)])
def test_a_ratio_too_large_for_float32_is_named(new_engine: NewEngine, loss_fn: str, advantage: float) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])

    failure = engine.run([policy_pass(loss_fn, -104.0, advantage)]).outputs["a", 1]

    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert failure.message.startswith(
        "Loss is not finite (seq 1); the gradient was discarded."
        " data[1].loss_fn_inputs.logprobs[2] is -104, and the target's log-probability is -"
    )
    assert f"now: {loss_fn} multiplies by exp of the difference" in failure.message
    assert not engine.adapters.state("a").grads.any()


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo"])
def test_a_rewarded_impossible_sample_trains_like_one_at_the_bound(new_engine: NewEngine, loss_fn: str) -> None:
    """Beyond the upper bound of a loss, the distance has no effect."""
    grads = []
    for then in (-60.0, -1e4):
        engine = new_engine()
        engine.run([Create("a", 0, SPEC)])
        output = engine.run([policy_pass(loss_fn, then, 1.0)]).outputs["a", 1]
        assert isinstance(output, PassOutput), output
        grads.append(engine.adapters.state("a").grads)
    assert torch.equal(*grads)
    assert grads[0].any()


@pytest.mark.parametrize(
    ("loss_fn", "then", "fails"),
    [
        ("importance_sampling", -40.0, False),
        ("ppo", -60.0, True),
        *(variant("ppo", then, False) for then in (-5.0, -40.0)),
        *(variant("importance_sampling", then, then == -60.0) for then in (-5.0, -60.0)),
    ],
)
def test_after_a_huge_ratio_every_weight_still_trains(
    new_engine: NewEngine, loss_fn: str, then: float, fails: bool
) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])
    adam = OptimStep("a", 2, 1e-3, 0.9, 0.95, 1e-12, 0.0, grad_clip_norm=0.0)
    assert isinstance(engine.run([policy_pass(loss_fn, then, -1.0)]).outputs["a", 1], PassOutput)

    step = engine.run([adam]).outputs["a", 2]

    if fails:
        assert isinstance(step, Failure)
        assert step.code == "not_finite"
        assert "data[1].loss_fn_inputs.target_tokens[2] of seq 1, where the loss has the slope" in step.message
        assert "(recorded: -60)" in step.message
    else:
        assert isinstance(step, StepOutput)
    good = Pass("a", 3, policy_pass(loss_fn, -5.0, -1.0).datums, loss_fn, {}, needs_grad=True)
    for seq in (3, 5):
        engine.run([replace(good, seq=seq), replace(adam, seq=seq + 1)])
    before = engine.adapters.state("a")
    engine.run([replace(good, seq=7), replace(adam, seq=8)])
    after = engine.adapters.state("a")
    moved = (after.weights != before.weights).float().mean()
    assert float(moved) > 0.99  # rows of A without a gradient so far stay


def test_a_huge_weight_of_cross_entropy_is_named_by_the_step_too(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])
    datum = random_datum(np.random.default_rng(4), "cross_entropy", 5)
    datum.inputs["weights"][:] = 1.0
    datum.inputs["weights"][3] = 1e25
    step = OptimStep("a", 2, 1e-3, 0.9, 0.95, 1e-12, 0.0, grad_clip_norm=0.0)

    failure = engine.run([Pass("a", 1, [datum], "cross_entropy", {}, needs_grad=True), step]).outputs["a", 2]

    assert isinstance(failure, Failure)
    assert "data[0].loss_fn_inputs.target_tokens[3] of seq 1" in failure.message


def test_a_clipped_step_accepts_a_huge_ratio(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC), policy_pass("ppo", -60.0, -1.0)])
    step = OptimStep("a", 2, 1e-3, 0.9, 0.95, 1e-12, 0.0, grad_clip_norm=1.0)
    assert isinstance(engine.run([step]).outputs["a", 2], StepOutput)


def test_a_pass_with_infinite_weights_names_the_remedy(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("a", 0, SPEC)])
    state = engine.adapters.state("a")
    state.weights.fill_(np.inf)
    engine.adapters.restore("a", state)

    failure = engine.run([policy_pass("ppo", -5.0, 1.0)]).outputs["a", 1]

    assert isinstance(failure, Failure)
    assert "The run's own weights are not finite" in failure.message
    assert "load an earlier checkpoint (load_state)" in failure.message
