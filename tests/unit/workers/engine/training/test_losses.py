"""Losses and their gradients, compared with formulas, and the validation of passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cotrain_workers.engine.ops import Datum, Pass
from cotrain_workers.engine.training.losses import DATUM_LENGTHS, LOSSES, refuse_pass, value, value_and_slope
from tests.support.draws import examples
from tests.support.training import random_datum

FP64 = torch.float64
BOUNDS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}

finite = st.floats(-3, 3, allow_nan=False, width=32)
tokens = st.lists(
    st.tuples(st.floats(-8, 0, width=32), st.floats(-8, 0, width=32), finite, st.booleans()), min_size=1, max_size=6
)


def clip(x: float) -> float:
    return min(max(x, BOUNDS["clip_low_threshold"]), BOUNDS["clip_high_threshold"])


def inside(x: float) -> bool:
    return BOUNDS["clip_low_threshold"] < x < BOUNDS["clip_high_threshold"]


# (lp, q, A) -> the loss of one token and its derivative by lp, written out by hand
def cross_entropy(lp: float, q: float, a: float) -> tuple[float, float]:
    return -a * lp, -a


def importance_sampling(lp: float, q: float, a: float) -> tuple[float, float]:
    r = math.exp(lp - q)
    return -r * a, -r * a


def ppo(lp: float, q: float, a: float) -> tuple[float, float]:
    r = math.exp(lp - q)
    is_clipped = min(r * a, clip(r) * a) != r * a
    return -min(r * a, clip(r) * a), 0.0 if is_clipped else -r * a


def cispo(lp: float, q: float, a: float) -> tuple[float, float]:
    r = clip(math.exp(lp - q))
    return -r * lp * a, -r * a


def dro(lp: float, q: float, a: float) -> tuple[float, float]:
    if a == q == 0:
        return 0.0, 0.0
    return -(lp * a - 0.5 * 0.2 * (lp - q) ** 2), -(a - 0.2 * (lp - q))


@pytest.mark.parametrize(
    ("name", "by_hand", "config"),
    [
        ("cross_entropy", cross_entropy, {}),
        ("importance_sampling", importance_sampling, {}),
        ("ppo", ppo, BOUNDS),
        ("cispo", cispo, BOUNDS),
        ("dro", dro, {"beta": 0.2}),
    ],
)
@given(rows=tokens)
@settings(max_examples=examples(60), deadline=None)
def test_loss_and_gradient_equal_the_formula(
    name: str,
    by_hand: Callable[[float, float, float], tuple[float, float]],
    config: Mapping[str, float],
    rows: list[tuple[float, float, float, bool]],
) -> None:
    # A kink has no derivative, so the values are not at the clip bounds.
    ratios = [math.exp(lp - q) for lp, q, *_ in rows]
    assume(all(abs(r - bound) > 1e-6 for r in ratios for bound in BOUNDS.values()))
    lp, q, a, _ = (torch.tensor(list(column), dtype=FP64) for column in zip(*rows, strict=True))
    inputs = {"weights": a, "logprobs": q, "advantages": a}

    total, slope = value_and_slope(LOSSES[name], lp, inputs, config)

    expected = [by_hand(*row[:3]) for row in rows]
    assert float(total) == pytest.approx(sum(loss for loss, _ in expected), rel=1e-9, abs=1e-9)
    assert slope.tolist() == pytest.approx([s for _, s in expected], rel=1e-9, abs=1e-9)
    assert float(value(LOSSES[name], lp, inputs, config)) == float(total)


@given(rows=tokens)
@settings(max_examples=examples(60), deadline=None)
def test_gspo_has_one_ratio_per_datum_and_a_gradient_per_token(rows: list[tuple[float, float, float, bool]]) -> None:
    lp, q, a, m = (torch.tensor(list(column), dtype=FP64) for column in zip(*rows, strict=True))
    inputs = {"logprobs": q, "advantages": a, "sequence_ratio_mask": m}

    total, slope = value_and_slope(LOSSES["gspo"], lp, inputs, BOUNDS)

    apart = [row[0] - row[1] for row in rows if row[3]]
    s = math.exp(sum(apart) / max(len(apart), 1))
    losses = [-min(s * row[2], clip(s) * row[2]) for row in rows]
    assert float(total) == pytest.approx(sum(losses), rel=1e-9, abs=1e-9)
    for row, got in zip(rows, slope.tolist(), strict=True):
        is_clipped = min(s * row[2], clip(s) * row[2]) != s * row[2]
        if inside(s) or abs(s - clip(s)) > 1e-6:
            assert got == pytest.approx(0.0 if is_clipped else -s * row[2], rel=1e-9, abs=1e-9)


def many_datums(count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Return log-probabilities, inputs and lengths of `count` datums for gspo."""
    lengths = [1 + at % 9 for at in range(count)]
    g = torch.Generator().manual_seed(0)
    lp, q, a, m = (torch.randn(sum(lengths), 1, generator=g) for _ in range(4))
    inputs = {"logprobs": q, "advantages": a, "sequence_ratio_mask": (m > 0).float()}
    return lp, {**inputs, DATUM_LENGTHS: torch.tensor(lengths)}, lengths


def test_no_bit_of_gspo_depends_on_other_datums() -> None:
    lp, inputs, lengths = many_datums(40)
    inputs["logprobs"][1] = -torch.inf  # of the second datum

    terms = LOSSES["gspo"].compute(lp, inputs, BOUNDS).split(lengths)
    del inputs[DATUM_LENGTHS]
    cut = {name: values.split(lengths) for name, values in inputs.items()}
    for at, (own, found) in enumerate(zip(lp.split(lengths), terms, strict=True)):
        alone = {name: values[at] for name, values in cut.items()}
        expected = LOSSES["gspo"].compute(own, alone, BOUNDS)
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), at


def test_gspo_launches_as_many_operations_for_many_datums_as_for_two() -> None:
    counts = []
    for datums in (2, 50):
        lp, inputs, _ = many_datums(datums)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            value_and_slope(LOSSES["gspo"], lp, inputs, BOUNDS)
        counts.append(len(profile.events()))
    assert counts[0] == counts[1] > 0


# (log-ratio, A, slope): ratios that count as their bound, and unclipped ones.
FAR = [
    *((apart, 2.0, 0.0) for apart in (1.0, 60.0, 88.0, 89.0, 104.0, 1e4, 3e38)),
    *((apart, -2.0, 0.0) for apart in (-1.0, -89.0, -104.0, -1e4, -3e38)),
    *((apart, 0.0, 0.0) for apart in (-1e4, 1e4)),
    (-2.0, 2.0, -2.0 * math.exp(-2.0)),
    (2.0, -2.0, 2.0 * math.exp(2.0)),
    (70.0, -2.0, 2.0 * math.exp(70.0)),
]


@pytest.mark.parametrize(("apart", "advantage", "slope"), FAR)
@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_a_clipped_ratio_of_any_size_has_no_gradient(
    name: str, dtype: torch.dtype, apart: float, advantage: float, slope: float
) -> None:
    """Beyond `exp(88.7)` a float32 ratio is infinite, and `0 * inf` would be NaN."""
    lp = torch.tensor([-1.0, -1.5], dtype=dtype)
    inputs = {
        "logprobs": lp - torch.tensor([apart, 0.0], dtype=dtype),
        "advantages": torch.tensor([advantage, 0.0], dtype=dtype),
        "sequence_ratio_mask": torch.tensor([1.0, 0.0], dtype=dtype),
    }

    total, found = value_and_slope(LOSSES[name], lp, inputs, BOUNDS)

    ratio = math.exp(min(apart, 600.0))
    expected = -min(ratio * advantage, clip(ratio) * advantage)
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert found.tolist() == pytest.approx([slope, 0.0], rel=1e-5, abs=0.0)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("apart", [89.0, math.inf])
def test_a_rewarded_impossible_sample_counts_as_the_upper_bound(name: str, apart: float) -> None:
    lp = torch.tensor([-1.0])
    inputs = {"logprobs": lp - apart, "advantages": torch.ones(1)}
    inputs["sequence_ratio_mask"] = torch.ones(1)

    total, slope = value_and_slope(LOSSES[name], lp, inputs, BOUNDS)

    assert float(total) == pytest.approx(lp.item() * -1.4 if name == "cispo" else -1.4)
    assert slope.tolist() == pytest.approx([-1.4 if name == "cispo" else 0.0])


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_without_an_upper_bound_a_ratio_is_not_limited(name: str) -> None:
    lp = torch.tensor([-1.0])
    inputs = {"advantages": torch.ones(1), "sequence_ratio_mask": torch.ones(1)}
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": math.inf}

    for apart in (70.0, 88.5):
        total, slope = value_and_slope(LOSSES[name], lp, {**inputs, "logprobs": lp - apart}, config)
        assert float(total) == pytest.approx(-math.exp(apart), rel=1e-5)
        assert float(slope) == pytest.approx(-math.exp(apart), rel=1e-5)
    beyond, _ = value_and_slope(LOSSES[name], lp, {**inputs, "logprobs": lp - 104.0}, config)
    assert float(beyond) == -math.inf


@pytest.mark.parametrize(("name", "advantage"), [("importance_sampling", 1.0), ("ppo", -1.0), ("gspo", -1.0)])
def test_an_unclipped_infinite_ratio_stays_infinite(name: str, advantage: float) -> None:
    lp = torch.tensor([-1.0])
    inputs = {"logprobs": lp - 104.0, "advantages": torch.tensor([advantage])}
    inputs["sequence_ratio_mask"] = torch.ones(1)

    total, _ = value_and_slope(LOSSES[name], lp, inputs, LOSSES[name].defaults)

    assert math.isinf(float(total))


@given(rows=tokens)
@settings(max_examples=examples(60), deadline=None)
def test_the_float32_gradient_of_ppo_equals_a_finite_difference(rows: list[tuple[float, float, float, bool]]) -> None:
    """Computed in float64. `lp - q` reaches 800, for which float32 has no ratio."""
    lp, q, a, m = (torch.tensor(list(column), dtype=FP64) for column in zip(*rows, strict=True))
    q = torch.where(a > 0, 100 * q, q)  # unlikely when sampled, and rewarded
    inputs = {"logprobs": q, "advantages": a, "sequence_ratio_mask": m}
    narrow = {name: values.float() for name, values in inputs.items()}
    ratios = torch.exp(lp - q)
    assume(all(float((ratios - bound).abs().min()) > 1e-3 for bound in BOUNDS.values()))
    step = 1e-6

    _, slope = value_and_slope(LOSSES["ppo"], lp.float(), narrow, BOUNDS)

    assert slope.isfinite().all()
    for index, got in enumerate(slope.tolist()):
        above, below = lp.clone(), lp.clone()
        above[index] += step
        below[index] -= step
        rise = value(LOSSES["ppo"], above, inputs, BOUNDS) - value(LOSSES["ppo"], below, inputs, BOUNDS)
        assert got == pytest.approx(float(rise) / (2 * step), rel=1e-3, abs=1e-3)


def test_dro_ignores_the_prompt_and_includes_sampled_tokens() -> None:
    """A prompt has neither an advantage nor a log-probability at sampling: both are 0."""
    lp = torch.tensor([-8.0, -math.inf, -8.0, -8.0, -8.0], dtype=FP64)
    inputs = {
        "logprobs": torch.tensor([0.0, -0.0, -6.0, 0.0, -6.0], dtype=FP64),
        "advantages": torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0], dtype=FP64),
    }

    total, slope = value_and_slope(LOSSES["dro"], lp, inputs, {"beta": 0.05})

    pull = [0.0, 0.0, 0.05 * -2, 0.05 * -8 - 1, 0.05 * -2 - 1]
    assert slope.tolist() == pytest.approx(pull)
    assert float(total) == pytest.approx(0.025 * (4 + 64 + 4) + 8 + 8)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"dro", "gspo"}))
def test_a_token_without_weight_adds_nothing_at_any_log_probability(name: str) -> None:
    """`exp(lp - q)` of the second token and `lp` of the third are infinite, and `0 * inf` would be NaN."""
    lp = torch.tensor([-1.0, 0.0, -math.inf])
    counts = torch.tensor([1.0, 0.0, 0.0])
    inputs = {"weights": counts, "advantages": counts, "logprobs": torch.tensor([-1.0, -1e4, -1.0])}

    total, slope = value_and_slope(LOSSES[name], lp, inputs, LOSSES[name].defaults)

    assert math.isfinite(float(total))
    share = 1 / 3 if name in ("grpo", "sapo") else 1.0  # of a mean over the datum
    assert float(slope[0]) == pytest.approx(-share)
    assert slope[1:].tolist() == [0.0, 0.0]


def test_cross_entropy_accepts_several_targets_per_token() -> None:
    lp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    weights = torch.tensor([[0.5, 0.25], [-1.0, 0.0]])

    total, slope = value_and_slope(LOSSES["cross_entropy"], lp, {"weights": weights}, {})

    assert float(total) == 0.5 + 0.5 - 3.0
    torch.testing.assert_close(slope, -weights)


def test_the_defaults_are_the_documented_ones() -> None:
    ratio_bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    documented = {
        "ppo": ratio_bounds,
        "gspo": ratio_bounds,
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
        "grpo": {**ratio_bounds, "beta": 0.0},
        "dapo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
        "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
        "reinforce": {},
    }
    off = {"importance_cap": 0.0, "sequence_mask_above": 0.0}
    assert {name: LOSSES[name].defaults for name in documented} == {
        name: {**defaults, **off} for name, defaults in documented.items()
    }


GOOD = random_datum(np.random.default_rng(0), "ppo", 4)
PPO = Pass("a", 1, [GOOD, GOOD], "ppo", {"clip_low_threshold": 0.9}, needs_grad=True)


def refusal(op: Pass) -> str | None:
    return refuse_pass(op, 128, 16)


def with_input(**inputs: np.ndarray) -> Pass:
    return replace(PPO, datums=[GOOD, replace(GOOD, inputs={**GOOD.inputs, **inputs})])


def with_tokens(*tokens: int) -> Pass:
    return replace(PPO, datums=[GOOD, replace(GOOD, tokens=np.array(tokens))])


def test_a_valid_pass_is_accepted() -> None:
    assert refusal(PPO) is None


def test_inputs_unused_by_the_loss_are_ignored() -> None:
    assert refusal(with_input(weights=np.ones(99, np.float32))) is None


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (with_tokens(0, 1, 2, 128), "Token id 128 at position 3 is outside the vocabulary (0..127) (datum 1)."),
        (with_tokens(0, -1, 2, 3), "Token id -1 at position 1 is outside the vocabulary (0..127) (datum 1)."),
        (
            with_input(target_tokens=np.array([0, 1, 2**40, 3])),
            f"Target token id {2**40} at position 2 is outside the vocabulary (0..127) (datum 1).",
        ),
        (with_tokens(), "A datum has 1 to 16 tokens, not 0 (datum 1)."),
        (with_tokens(*range(17)), "A datum has 1 to 16 tokens, not 17 (datum 1)."),
        (
            with_input(target_tokens=np.zeros(5, np.int64)),
            "target_tokens has shape [5]; it must be [4] or [4, K] (datum 1).",
        ),
        (
            with_input(advantages=np.zeros((4, 1), np.float32)),
            "advantages has shape [4, 1]; target_tokens has [4] (datum 1).",
        ),
        (replace(PPO, datums=[Datum(GOOD.tokens, {})]), "Loss 'ppo' needs loss_fn_inputs['target_tokens'] (datum 0)."),
        (replace(PPO, loss_fn="gspo"), "Loss 'gspo' needs loss_fn_inputs['sequence_ratio_mask'] (datum 0)."),
        (replace(PPO, loss_config={"epsilon": 0.2}), "Loss 'ppo' has no setting 'epsilon'."),
    ],
)
def test_an_invalid_pass_is_refused_with_its_position(op: Pass, reason: str) -> None:
    assert refusal(op) == reason


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    reason = refusal(replace(PPO, loss_fn="mse"))

    assert reason is not None
    assert reason.startswith("Unknown loss_fn 'mse'; known are cispo, cross_entropy,")
