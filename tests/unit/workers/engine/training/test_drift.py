"""Metrics of drift, against their formulas in plain Python."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from cotrain_workers.engine.ops import Datum, Pass
from cotrain_workers.engine.training.drift import drift
from cotrain_workers.engine.training.losses import LOSSES

#: One prompt token, then sampled ones.
Q = [0.0, -1.0, -2.0, -1.5]
A = [0.0, 1.0, -1.0, 0.0]
LP = [-7.0, -0.5, -2.5, -1.5]
APART = [0.5, -0.5, 0.0]


def policy(loss_fn: str, config: dict[str, float] | None = None) -> Pass:
    inputs: dict[str, np.ndarray] = {
        "target_tokens": np.arange(4),
        "logprobs": np.array(Q, np.float32),
        "advantages": np.array(A, np.float32),
        "weights": np.ones(4, np.float32),
        "sequence_ratio_mask": np.array([0, 1, 1, 1], np.float32),
    }
    return Pass("a", 1, [Datum(np.arange(4), inputs)], loss_fn, config or {}, needs_grad=True)


def found(op: Pass) -> dict[str, float]:
    return drift(op, [np.array(LP, np.float32)])


@pytest.mark.parametrize("loss_fn", sorted(set(LOSSES) - {"cross_entropy"}))
def test_every_policy_loss_reports_the_distance_of_its_sampled_tokens(loss_fn: str) -> None:
    metrics = found(policy(loss_fn))
    ratios = [exp(each) for each in APART]
    assert metrics["sampled_tokens:sum"] == 3
    assert metrics["rollout_gap:mean"] == pytest.approx(1 / 3)
    assert metrics["rollout_gap:max"] == 0.5
    assert metrics["rollout_gap_p99:max"] == pytest.approx(0.5)
    expected = sum(ratios) ** 2 / (3 * sum(each**2 for each in ratios))
    assert metrics["effective_sample_size:mean"] == pytest.approx(expected)
    assert ("clip_fraction:mean" in metrics) is (loss_fn in ("ppo", "cispo", "gspo", "grpo", "dapo"))


@pytest.mark.parametrize(
    ("loss_fn", "config", "fraction"),
    [
        ("ppo", {}, 1.0),  # e^0.5 rewarded, e^-0.5 punished: both beyond their bounds
        ("ppo", {"clip_high_threshold": 2.0}, 0.5),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, 0.0),
        ("cispo", {}, 0.0),
        ("cispo", {"clip_low_threshold": 0.9}, 0.5),
        ("gspo", {}, 0.0),  # the ratio of the sequence is exp(0)
    ],
)
def test_the_clip_fraction_counts_ratios_out_of_bounds(loss_fn: str, config: dict[str, float], fraction: float) -> None:
    assert found(policy(loss_fn, config))["clip_fraction:mean"] == fraction


def test_a_far_ratio_is_no_infinity_and_others_have_no_drift() -> None:
    metrics = drift(policy("ppo"), [np.array([0.0, 500.0, -2.0, -1.5], np.float32)])
    assert metrics["effective_sample_size:mean"] == pytest.approx(1 / 3)
    assert metrics["rollout_gap:max"] == 501.0
    assert found(policy("cross_entropy")) == {}
    prompt_alone = policy("ppo")
    for name in ("logprobs", "advantages"):
        prompt_alone.datums[0].inputs[name][:] = 0
    assert found(prompt_alone) == {}
