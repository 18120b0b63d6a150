from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cotrain_workers.losses import LOSSES, value, value_and_slope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FP64 = torch.float64
BOUNDS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}

finite = st.floats(-3, 3, allow_nan=False, width=32)
tokens = st.lists(
    st.tuples(st.floats(-8, 0, width=32), st.floats(-8, 0, width=32), finite, st.booleans()),
    min_size=1,
    max_size=6,
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
    held = min(r * a, clip(r) * a) != r * a
    return -min(r * a, clip(r) * a), 0.0 if held else -r * a


def cispo(lp: float, q: float, a: float) -> tuple[float, float]:
    r = clip(math.exp(lp - q))
    return -r * lp * a, -r * a


def dro(lp: float, q: float, a: float) -> tuple[float, float]:
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
@settings(max_examples=60, deadline=None)
def test_loss_and_slope_equal_the_formula(
    name: str,
    by_hand: Callable[[float, float, float], tuple[float, float]],
    config: Mapping[str, float],
    rows: list[tuple[float, float, float, bool]],
) -> None:
    # A kink has no derivative: stay off the clip bounds.
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
@settings(max_examples=60, deadline=None)
def test_gspo_uses_one_ratio_per_datum_and_a_slope_per_token(
    rows: list[tuple[float, float, float, bool]],
) -> None:
    lp, q, a, m = (torch.tensor(list(column), dtype=FP64) for column in zip(*rows, strict=True))
    inputs = {"logprobs": q, "advantages": a, "sequence_ratio_mask": m}

    total, slope = value_and_slope(LOSSES["gspo"], lp, inputs, BOUNDS)

    apart = [row[0] - row[1] for row in rows if row[3]]
    s = math.exp(sum(apart) / max(len(apart), 1))
    losses = [-min(s * row[2], clip(s) * row[2]) for row in rows]
    assert float(total) == pytest.approx(sum(losses), rel=1e-9, abs=1e-9)
    for row, got in zip(rows, slope.tolist(), strict=True):
        held = min(s * row[2], clip(s) * row[2]) != s * row[2]
        if inside(s) or abs(s - clip(s)) > 1e-6:
            assert got == pytest.approx(0.0 if held else -s * row[2], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_token_without_advantage_cannot_spoil_the_sum(name: str) -> None:
    """`exp(lp - q)` is infinite there, and `0 * inf` would be NaN."""
    lp = torch.tensor([-1.0, 0.0])
    inputs = {"logprobs": torch.tensor([-1.0, -1e4]), "advantages": torch.tensor([1.0, 0.0])}

    total, slope = value_and_slope(LOSSES[name], lp, inputs, LOSSES[name].defaults)

    assert math.isfinite(float(total))
    assert slope.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_a_token_that_counts_nothing_may_be_impossible(name: str) -> None:
    lp = torch.tensor([-1.0, -math.inf])
    counts = torch.tensor([1.0, 0.0])
    inputs = {"weights": counts, "advantages": counts, "logprobs": torch.tensor([-1.0, -1.0])}

    total, slope = value_and_slope(LOSSES[name], lp, inputs, LOSSES[name].defaults)

    assert math.isfinite(float(total))
    assert slope.tolist() == [-1.0, 0.0]


def test_cross_entropy_takes_several_targets_per_token() -> None:
    lp = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    weights = torch.tensor([[0.5, 0.25], [-1.0, 0.0]])

    total, slope = value_and_slope(LOSSES["cross_entropy"], lp, {"weights": weights}, {})

    assert float(total) == 0.5 + 0.5 - 3.0
    torch.testing.assert_close(slope, -weights)


def test_the_defaults_are_the_documented_ones() -> None:
    ratio_bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert LOSSES["ppo"].defaults == ratio_bounds
    assert LOSSES["gspo"].defaults == ratio_bounds
    assert LOSSES["cispo"].defaults == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert LOSSES["dro"].defaults == {"beta": 0.05}
