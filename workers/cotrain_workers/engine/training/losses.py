"""The losses: pure functions of per-token log-probabilities, summed, never averaged.

`lp` is the current log-probability of a target, `q` the one recorded at sampling, `A` the advantage.
Tokens left out of a policy loss carry `A = 0`; there the ratio `exp(lp - q)` may be anything, so it is
never computed: `0 * inf` would be NaN. Nor is it where only its bound counts. Where a ratio counts as it
is and float32 does not hold it, the loss is infinite, and its request fails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Inputs = Mapping[str, torch.Tensor]
    Config = Mapping[str, float]
    LossFn = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]

POLICY_INPUTS = ("logprobs", "advantages")
RATIO_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True)
class LossSpec:
    """A loss and what it reads. `compute(logprobs, inputs, config)` returns one loss per token."""

    compute: LossFn
    inputs: tuple[str, ...]  # required in addition to target_tokens, of its shape
    defaults: Mapping[str, float] = field(default_factory=dict)  # every config key it knows
    per_token: bool = True  # False: a token's loss depends on the whole datum
    # Signs of an advantage with which the loss grows with the ratio.
    unbounded_for: tuple[int, ...] = ()


def cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-w * lp`; weights may be any real number. With K columns: soft targets."""
    weights = inputs["weights"]
    return -weights * torch.where(weights != 0, logprobs, 0.0)


def importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-exp(lp - q) * A`."""
    return -ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-min(r * A, clip(r) * A)` with the absolute ratio bounds of `config`."""
    return clipped_surrogate(logprobs - inputs["logprobs"], inputs["advantages"], config)


def cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-clip(r) * lp * A`, the clipped ratio taken as a constant."""
    advantages = inputs["advantages"]
    weight = clipped(ratio(logprobs, inputs).detach(), config)
    return -weight * torch.where(advantages != 0, logprobs, 0.0) * advantages


def dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-(lp * A - beta / 2 * (lp - q)^2)`, and 0 where `A` and `q` are both zero.

    That is how a prompt looks: it was not sampled, so there is nothing to stay near to. A token that was
    sampled and whose advantage happens to be zero keeps the quadratic term.
    """
    q, advantages = inputs["logprobs"], inputs["advantages"]
    logprobs = torch.where((advantages != 0) | (q != 0), logprobs, 0.0)
    return -(logprobs * advantages - 0.5 * config["beta"] * (logprobs - q) ** 2)


def gspo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-min(s * A, clip(s) * A)` of one datum, `s` its length-normalised sequence ratio.

    `s = exp(mean(lp - q))` over the tokens with `sequence_ratio_mask != 0` (1 if there are none); its
    value is the sequence's, its gradient reaches each token through that token's own `lp`.
    """
    masked = inputs["sequence_ratio_mask"] != 0
    frozen = logprobs.detach()
    log_ratio = torch.where(masked, frozen - inputs["logprobs"], 0.0)
    sequence_apart = log_ratio.sum() / masked.sum().clamp(min=1)
    return clipped_surrogate(sequence_apart + (logprobs - frozen), inputs["advantages"], config)


def ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return `exp(lp - q)`, and 1 where the advantage is zero."""
    apart = logprobs - inputs["logprobs"]
    return torch.exp(torch.where(inputs["advantages"] != 0, apart, 0.0))


def clipped(ratios: torch.Tensor, config: Config) -> torch.Tensor:
    """Return the ratios held between the absolute bounds of `config`."""
    return ratios.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def clipped_surrogate(
    apart: torch.Tensor, advantages: torch.Tensor, config: Config
) -> torch.Tensor:
    """Return `-min(r * A, clip(r) * A)` of the ratios `r = exp(apart)`.

    Well above the upper bound a rewarded token's loss no longer depends on its ratio. The exponent stops
    there, as the slope of an infinite `r` would be `0 * inf`.
    """
    enough = math.log(max(config["clip_high_threshold"], 1.0)) + 1.0
    counts = torch.where(advantages > 0, apart.clamp(max=enough), apart)
    ratios = torch.exp(torch.where(advantages != 0, counts, 0.0))
    return -torch.minimum(ratios * advantages, clipped(ratios, config) * advantages)


LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(cross_entropy, ("weights",)),
    "importance_sampling": LossSpec(importance_sampling, POLICY_INPUTS, unbounded_for=(-1, 1)),
    "ppo": LossSpec(ppo, POLICY_INPUTS, RATIO_BOUNDS, unbounded_for=(-1,)),
    # One-sided, as the public documentation has it now; earlier pages said 0.8 and 1.2.
    "cispo": LossSpec(
        cispo, POLICY_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    "dro": LossSpec(dro, POLICY_INPUTS, {"beta": 0.05}),
    # The defaults of gspo are documented nowhere; it takes those of ppo, whose keys it shares.
    "gspo": LossSpec(gspo, (*POLICY_INPUTS, "sequence_ratio_mask"), RATIO_BOUNDS, per_token=False),
}


def value_and_slope(
    loss: LossSpec, logprobs: torch.Tensor, inputs: Inputs, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss (float64 scalar) and its derivative by each log-probability."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        total = loss.compute(leaf, inputs, config).sum(dtype=torch.float64)
        (slope,) = torch.autograd.grad(total, leaf)
    return total.detach(), slope


def steepest_target(
    loss: LossSpec, logprobs: torch.Tensor, inputs: Inputs, config: Config
) -> tuple[float, int]:
    """Return the largest absolute slope of the loss by a log-probability of one datum, and its flat index.

    In float64, so that a slope is found that float32 cannot hold.
    """
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    _, slope = value_and_slope(loss, logprobs.double(), wide, config)
    size = slope.abs().nan_to_num(nan=math.inf, posinf=math.inf).flatten()
    index = int(size.argmax())
    return float(size[index]), index


def value(loss: LossSpec, logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return the summed loss (float64 scalar)."""
    return loss.compute(logprobs, inputs, config).sum(dtype=torch.float64)
