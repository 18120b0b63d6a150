"""Losses of publications, against their formulas in float64 numpy, with slopes by central differences.

Values agree to 1e-12, slopes to 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.ops import Datum, Pass
from cotrain_workers.engine.training.drift import drift
from cotrain_workers.engine.training.losses import DATUM_LENGTHS, LOSSES, inputs_of, loss_of, value_and_slope

#: Two datums of 5 and 3 tokens; the first token of each is a prompt.
LENGTHS = (5, 3)
RNG = np.random.default_rng(5)
LP = RNG.normal(-2.0, 1.0, 8)
IS_PROMPT = np.array([1, 0, 0, 0, 0, 1, 0, 0], bool)
Q = np.where(IS_PROMPT, 0.0, LP + RNG.normal(0, 0.4, 8))
ROLLOUT = np.where(IS_PROMPT, 0.0, Q + RNG.normal(0, 0.4, 8))
REFERENCE = LP + RNG.normal(0, 0.5, 8)
A = np.where(IS_PROMPT, 0.0, np.repeat([1.3, -0.7], LENGTHS))
INPUTS = {"logprobs": Q, "advantages": A, "rollout_logprobs": ROLLOUT, "reference_logprobs": REFERENCE}
FIRST, SECOND = slice(0, 5), slice(5, 8)


def surrogate(lp: np.ndarray, low: float = 0.8, high: float = 1.2) -> np.ndarray:
    r = np.exp(lp - Q)
    return np.where(IS_PROMPT, 0.0, np.minimum(r * A, r.clip(low, high) * A))


def per_output(tokens: np.ndarray) -> float:
    """Return the sum over outputs of the mean over their sampled tokens."""
    return float(tokens[FIRST].sum() / 4 + tokens[SECOND].sum() / 2)


def reinforce(lp: np.ndarray, config: Mapping[str, float]) -> float:
    return float(-(lp * A).sum())


def grpo(lp: np.ndarray, config: Mapping[str, float]) -> float:
    d = REFERENCE - lp
    k3 = np.where(IS_PROMPT, 0.0, np.exp(d) - d - 1)
    return per_output(-surrogate(lp) + config.get("beta", 0.0) * k3)


def dapo(lp: np.ndarray, config: Mapping[str, float]) -> float:
    return float(-surrogate(lp, 0.8, 1.28).sum())


def sapo(lp: np.ndarray, config: Mapping[str, float]) -> float:
    tau = np.where(A > 0, 1.0, 1.05)
    gate = 4 / tau / (1 + np.exp(-tau * (np.exp(lp - Q) - 1)))
    return per_output(np.where(IS_PROMPT, 0.0, -gate * A))


def truncated(lp: np.ndarray, config: Mapping[str, float]) -> float:
    weight = np.minimum(np.exp(Q - ROLLOUT), config["importance_cap"])
    return float(-(weight * surrogate(lp)).sum())


def masked(lp: np.ndarray, config: Mapping[str, float]) -> float:
    """Drop the punished second output: the mean of its log-ratio, at the point of the derivative, is above the limit."""
    assert (ROLLOUT - LP)[6:].mean() > config["sequence_mask_above"]
    return float(-surrogate(lp)[FIRST].sum())


ROWS = [
    ("reinforce", reinforce, {}),
    ("grpo", grpo, {}),
    ("grpo", grpo, {"beta": 0.04}),
    ("dapo", dapo, {}),
    ("sapo", sapo, {}),
    ("ppo", truncated, {"importance_cap": 1.1}),
    ("ppo", masked, {"sequence_mask_above": float((ROLLOUT - LP)[6:].mean()) - 1e-3}),
]


def op_of(loss_fn: str, config: Mapping[str, float]) -> Pass:
    datums = [
        Datum(np.arange(len(LP[part])), {
            "target_tokens": np.arange(len(LP[part])),
            **{name: values[part].astype(np.float32) for name, values in INPUTS.items()},
        })
        for part in (FIRST, SECOND)
    ]  # fmt: skip
    return Pass("a", 1, datums, loss_fn, config, needs_grad=True)


@pytest.mark.parametrize(("loss_fn", "formula", "config"), ROWS)
def test_a_loss_equals_its_published_formula(loss_fn: str, formula: Any, config: Mapping[str, float]) -> None:
    op = op_of(loss_fn, config)
    loss = loss_of(op, op.datums)
    inputs = {name: torch.from_numpy(INPUTS[name])[:, None] for name in inputs_of(op, loss)}
    if not loss.per_token:
        inputs[DATUM_LENGTHS] = torch.tensor(LENGTHS)
    total, slope = value_and_slope(loss, torch.from_numpy(LP)[:, None], inputs, {**loss.defaults, **config})

    assert total.item() == pytest.approx(formula(LP, config), abs=1e-12)
    step = 1e-6
    for at in range(8):
        nudge = np.eye(8)[at] * step
        expected = (formula(LP + nudge, config) - formula(LP - nudge, config)) / (2 * step)
        assert slope[at, 0].item() == pytest.approx(expected, abs=1e-6)


def test_far_ratios_of_sapo_have_no_gradient_and_no_nan() -> None:
    inputs = {"logprobs": torch.zeros(2, 1), "advantages": torch.tensor([[1.0], [-1.0]])}
    total, slope = value_and_slope(LOSSES["sapo"], torch.tensor([[500.0], [500.0]]), inputs, LOSSES["sapo"].defaults)
    assert total.item() == pytest.approx((-4.0 + 4 / 1.05) / 2, abs=1e-6)
    assert slope.abs().max() < 1e-30


def test_drift_with_both_log_probs_shows_them_side_by_side() -> None:
    found = [LP[FIRST].astype(np.float32), LP[SECOND].astype(np.float32)]
    metrics = drift(op_of("ppo", {"importance_cap": 1.1}), found)
    sampled = ~IS_PROMPT
    weights = np.exp(Q - ROLLOUT)[sampled]
    expected = {
        "rollout_gap:mean": np.abs(LP - ROLLOUT)[sampled].mean(),
        "policy_gap:mean": np.abs(LP - Q)[sampled].mean(),
        "importance_weight:mean": weights.mean(),
        "importance_capped:mean": (weights > 1.1).mean(),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
