"""Losses, and validation of passes on the host.

Losses are pure functions of per-token log-probabilities, summed, never averaged. `lp` is the
current log-probability of a target, `q` the one recorded at sampling, `A` the advantage. Tokens
excluded from a policy loss have `A = 0`. Their ratio `exp(lp - q)` may be anything, so it is never
computed: `0 * inf` would be NaN. It is not computed either where only its bound counts. An
unbounded ratio that exceeds float32 makes the loss infinite, and its request fails.

The engine validates a pass on the host before it uses the device. The server has already checked
all of it, but a wrong index on a GPU would crash the process for every tenant.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cotrain_workers.engine.ops import Datum, KlDatum, Pass, ReverseKl
from cotrain_workers.engine.spec import AdapterSpec, Layout
from cotrain_workers.engine.training.custom_loss import loss_of_datums

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
LossFn = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]

POLICY_INPUTS = ("logprobs", "advantages")
#: Input of a loss that is not per token: rows of each datum, int64 `[datums]`.
DATUM_LENGTHS = "datum_lengths"
RATIO_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True)
class LossSpec:
    """A loss and its inputs. `compute(logprobs, inputs, config)` returns one loss per token."""

    compute: LossFn
    inputs: tuple[str, ...]  # next to target_tokens, of its shape
    defaults: Mapping[str, float] = field(default_factory=dict)  # All valid config keys.
    per_token: bool = True  # False: a token's loss depends on the whole datum
    # Signs of an advantage for which the loss grows with the ratio.
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

    Prompt tokens have both zero: they were not sampled, so there is no value to stay near to. A
    sampled token whose advantage happens to be zero keeps the quadratic term.
    """
    q, advantages = inputs["logprobs"], inputs["advantages"]
    logprobs = torch.where((advantages != 0) | (q != 0), logprobs, 0.0)
    return -(logprobs * advantages - 0.5 * config["beta"] * (logprobs - q) ** 2)


def gspo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-min(s * A, clip(s) * A)`, `s` the length-normalised sequence ratio of each datum.

    `s = exp(mean(lp - q))` over the tokens with `sequence_ratio_mask != 0` (1 if there are none).
    Its value is the sequence's; its gradient reaches each token through that token's own `lp`.
    Datums have `inputs[DATUM_LENGTHS]` rows each; without that input there is one.
    """
    masked = inputs["sequence_ratio_mask"] != 0
    frozen = logprobs.detach()
    log_ratio = torch.where(masked, frozen - inputs["logprobs"], 0.0)
    lengths = inputs.get(DATUM_LENGTHS)
    if lengths is None:
        lengths = torch.full((1,), len(logprobs), device=logprobs.device)
    apart = datum_sums(log_ratio, lengths) / datum_sums(masked, lengths).clamp(min=1)
    # The output size spares the host a wait for the lengths.
    of_row = apart.repeat_interleave(lengths, output_size=len(logprobs)).to(logprobs.dtype)
    sequence_apart = of_row.reshape(-1, *[1] * (logprobs.ndim - 1))
    return clipped_surrogate(sequence_apart + (logprobs - frozen), inputs["advantages"], config)


def datum_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sum of each datum, float64 `[datums]`; `values` are `[n]` or `[n, K]`.

    One call covers all datums, and an infinite value stays in its own datum.
    """
    rows = values.reshape(len(values), -1).sum(dim=1, dtype=torch.float64)
    # `unsafe` omits checks of the lengths, which would wait for the device.
    return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)


def ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return `exp(lp - q)`, and 1 where the advantage is zero."""
    apart = logprobs - inputs["logprobs"]
    return torch.exp(torch.where(inputs["advantages"] != 0, apart, 0.0))


def clipped(ratios: torch.Tensor, config: Config) -> torch.Tensor:
    """Return the ratios clamped to the absolute bounds of `config`."""
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
    # One-sided, as in the current public documentation; earlier pages said 0.8 and 1.2.
    "cispo": LossSpec(
        cispo, POLICY_INPUTS, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    "dro": LossSpec(dro, POLICY_INPUTS, {"beta": 0.05}),
    # The defaults of gspo are undocumented. It uses those of ppo, whose keys it shares.
    "gspo": LossSpec(gspo, (*POLICY_INPUTS, "sequence_ratio_mask"), RATIO_BOUNDS, per_token=False),
}


def loss_of(op: Pass, datums: Sequence[Datum]) -> LossSpec:
    """Return the loss of some datums of a pass, whose `loss_fn` is known."""
    if op.graph is not None:
        return LossSpec(loss_of_datums(op.graph, datums), (), per_token=False)
    return LOSSES[op.loss_fn]


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
    """Return the largest absolute slope of the loss by a log-probability of one datum, and its
    flat index.

    Computed in float64, to find slopes that exceed float32.
    """
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    _, slope = value_and_slope(loss, logprobs.double(), wide, config)
    size = slope.abs().nan_to_num(nan=math.inf, posinf=math.inf).flatten()
    index = int(size.argmax())
    return float(size[index]), index


def value(loss: LossSpec, logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return the summed loss (float64 scalar)."""
    return loss.compute(logprobs, inputs, config).sum(dtype=torch.float64)


TARGETS = "target_tokens"


def refuse_pass(op: Pass, vocab_size: int, context_length: int) -> str | None:
    """Return why this pass cannot run, as a sentence for the tenant, or None."""
    if op.loss_fn not in LOSSES and op.graph is None:
        return f"Unknown loss_fn {op.loss_fn!r}; known are {', '.join(sorted(LOSSES))}."
    loss = loss_of(op, op.datums)
    unknown = sorted(set(op.loss_config) - set(loss.defaults))
    if unknown:
        return f"Loss {op.loss_fn!r} has no setting {unknown[0]!r}."
    for at, datum in enumerate(op.datums):
        reason = refuse_shapes(op.loss_fn, loss, datum, context_length)
        reason = reason or refuse_tokens(datum, vocab_size)
        if reason:
            return f"{reason} (datum {at})."
    return None


def refuse_reverse_kl(
    op: ReverseKl,
    vocab_size: int,
    context_length: int,
    *,
    layout_of: Callable[[AdapterSpec], Layout],
) -> str | None:
    """Return why this reverse KL cannot run, as a sentence for the tenant, or None."""
    if not 0 < op.temperature < math.inf:
        return f"temperature is {op.temperature}; it must be positive and finite."
    reference = op.reference
    if reference and reference.flat.shape != (layout_of(reference.spec).size,):
        return "The reference was made for another base model."
    for at, datum in enumerate(op.datums):
        reason = refuse_kl_shapes(datum, context_length)
        reason = reason or refuse_outside("Token", datum.tokens, vocab_size)
        reason = reason or refuse_outside("Reference token", datum.reference, vocab_size)
        if reason:
            return f"{reason} (datum {at})."
    return None


def refuse_kl_shapes(datum: KlDatum, context_length: int) -> str | None:
    """Return the error in the lengths of a reverse KL's datum, or None."""
    for tokens in (datum.tokens, datum.reference):
        if not 0 < len(tokens) <= context_length:
            return f"A datum has 1 to {context_length} tokens, not {len(tokens)}"
    most = min(len(datum.tokens), len(datum.reference))
    if datum.weights.ndim != 1 or not 0 < len(datum.weights) <= most:
        return (
            f"weights has shape {list(datum.weights.shape)}; there is room for 1 to {most} targets"
        )
    return None


def refuse_shapes(name: str, loss: LossSpec, datum: Datum, context_length: int) -> str | None:
    """Return the error in the lengths and shapes of a datum, or None."""
    length = len(datum.tokens)
    if not 0 < length <= context_length:
        return f"A datum has 1 to {context_length} tokens, not {length}"
    if TARGETS not in datum.inputs:
        return f"Loss {name!r} needs loss_fn_inputs[{TARGETS!r}]"
    shape = datum.inputs[TARGETS].shape
    if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
        return f"{TARGETS} has shape {list(shape)}; it must be [{length}] or [{length}, K]"
    for wanted in loss.inputs:
        if wanted not in datum.inputs:
            return f"Loss {name!r} needs loss_fn_inputs[{wanted!r}]"
        if datum.inputs[wanted].shape != shape:
            return f"{wanted} has shape {list(datum.inputs[wanted].shape)}; {TARGETS} has {list(shape)}"
    return None


def refuse_tokens(datum: Datum, vocab_size: int) -> str | None:
    """Return an error for the first token id outside the vocabulary, or None."""
    reason = refuse_outside("Token", datum.tokens, vocab_size)
    return reason or refuse_outside("Target token", datum.inputs[TARGETS], vocab_size)


def refuse_outside(name: str, tokens: np.ndarray, vocab_size: int) -> str | None:
    """Return an error for the first of these token ids outside the vocabulary, or None."""
    outside = (tokens < 0) | (tokens >= vocab_size)
    if not outside.any():
        return None
    where = np.argwhere(outside)[0]
    return (
        f"{name} id {tokens[tuple(where)]} at position {where[0]} "
        f"is outside the vocabulary (0..{vocab_size - 1})"
    )
