"""A pass whose log-probabilities lie so far apart that float32 has no ratio of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from cotrain_workers.engine.ops import Create, Failure, Pass, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.training import random_datum

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_workers.engine.engine import Engine

    NewEngine = Callable[..., Engine]

SPEC = AdapterSpec(4, seed=0)


def policy_pass(loss_fn: str, then: float, advantage: float) -> Pass:
    """Return a pass of two datums; one token of the second has another log-probability at sampling."""
    rng = np.random.default_rng(4)
    datums = [random_datum(rng, loss_fn, length) for length in (3, 5)]
    datums[1].inputs["logprobs"][2], datums[1].inputs["advantages"][2] = then, advantage
    return Pass("a", 1, datums, loss_fn, {}, needs_grad=True)


@pytest.mark.parametrize(("loss_fn", "advantage"), [("importance_sampling", 1.0), ("ppo", -1.0)])
def test_a_ratio_that_float32_cannot_hold_is_named(
    new_engine: NewEngine, loss_fn: str, advantage: float
) -> None:
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
def test_an_impossible_sample_that_is_rewarded_trains_like_one_just_out_of_bounds(
    new_engine: NewEngine, loss_fn: str
) -> None:
    """Beyond the upper bound it does not count how far, for any loss that has one."""
    grads = []
    for then in (-60.0, -1e4):
        engine = new_engine()
        engine.run([Create("a", 0, SPEC)])
        output = engine.run([policy_pass(loss_fn, then, 1.0)]).outputs["a", 1]
        assert isinstance(output, PassOutput), output
        grads.append(engine.adapters.state("a").grads)
    assert torch.equal(*grads)
    assert grads[0].any()
