"""Losses, and validation of passes on the host.

Losses are pure functions of per-token log-probabilities, summed, never averaged. `lp` is the current log-probability of
a target, `q` the one recorded at sampling, `A` the advantage. Tokens excluded from a policy loss have `A = 0`. Their
ratio `exp(lp - q)` may be anything, so it is never computed: `0 * inf` would be NaN. It is not computed either where
only its bound counts. An unbounded ratio that exceeds float32 makes the loss infinite, and its request fails.

The engine validates a pass on the host before it uses the device. The server has already checked
all of it, but a wrong index on a GPU would crash the process for every tenant.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cotrain_workers.engine.ops import Datum, KlDatum, Pass, ReverseKl
from cotrain_workers.engine.spec import AdapterSpec, Layout
from cotrain_workers.engine.training.custom_loss import loss_of_datums

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]
LossFn = Callable[[torch.Tensor, Inputs, Config], torch.Tensor]

#: Input of every loss.
TARGETS = "target_tokens"
POLICY_INPUTS = ("logprobs", "advantages")
#: Input of a loss that is not per token: rows of each datum, int64 `[datums]`.
DATUM_LENGTHS = "datum_lengths"
RATIO_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
#: Inputs that a policy loss may read: log-probabilities of the sampler, if `logprobs` are the trainer's own.
ROLLOUT = "rollout_logprobs"
REFERENCE = "reference_logprobs"
#: Settings of every policy loss; 0 is off.
IMPORTANCE_CAP = "importance_cap"
SEQUENCE_MASK = "sequence_mask_above"
CORRECTIONS = {IMPORTANCE_CAP: 0.0, SEQUENCE_MASK: 0.0}


@dataclass(frozen=True)
class LossSpec:
    """A loss and its inputs. `compute(logprobs, inputs, config)` returns one loss per token."""

    compute: LossFn
    inputs: tuple[str, ...]  # next to target_tokens, of its shape
    defaults: Mapping[str, float] = field(default_factory=dict)  # all valid config keys
    optional: tuple[str, ...] = ()  # inputs that all datums of a pass have, or none
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
    lengths = lengths_of(logprobs, inputs)
    apart = datum_sums(log_ratio, lengths) / datum_sums(masked, lengths).clamp(min=1)
    sequence_apart = of_each_row(apart, lengths, logprobs)
    return clipped_surrogate(sequence_apart + (logprobs - frozen), inputs["advantages"], config)


def reinforce(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-lp * A` (Williams, 1992)."""
    advantages = inputs["advantages"]
    return -torch.where(advantages != 0, logprobs, 0.0) * advantages


def grpo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `(-min(r * A, clip(r) * A) + beta * k3) / n`, `n` the sampled tokens of the datum.

    `k3 = exp(ref - lp) - (ref - lp) - 1` estimates the KL divergence from the reference policy (Shao et al., 2024,
    equations 3 and 4, arXiv:2402.03300). The mean over the group is left to the caller, as a constant factor.
    """
    losses = corrected(ppo)(logprobs, inputs, config)
    if config["beta"] > 0:
        apart = torch.where(is_sampled(inputs), inputs[REFERENCE] - logprobs, 0.0)
        losses = losses + config["beta"] * (torch.exp(apart) - apart - 1)
    return losses / sampled_tokens(logprobs, inputs)


def sapo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    """Return `-4 / tau * sigmoid(tau * (r - 1)) * A / n`, `n` the sampled tokens of the datum.

    `tau` is `tau_positive` for `A > 0` and else `tau_negative` (Gao et al., 2025, arXiv:2511.20347). Far above 1 the
    gate is flat, so the exponent stops there, as in `clipped_surrogate`.
    """
    advantages = inputs["advantages"]
    tau = torch.full_like(advantages, config["tau_negative"])
    tau = tau.masked_fill(advantages > 0, config["tau_positive"])
    apart = torch.where(advantages != 0, logprobs - inputs["logprobs"], 0.0)
    ratios = torch.exp(torch.minimum(apart, torch.log1p(100.0 / tau)))
    gate = 4.0 / tau * torch.sigmoid(tau * (ratios - 1))
    return -gate * advantages / sampled_tokens(logprobs, inputs)


def corrected(compute: LossFn) -> LossFn:
    """Return a policy loss with truncated importance weights and sequence masks, where its settings request them.

    Each token's loss is multiplied by constants. `min(exp(q - rollout), importance_cap)` corrects the numbers of a
    sampler that differ from the trainer's (Yao et al., 2025, truncated importance sampling). Tokens with `A < 0` of a
    datum count 0 if the mean of `rollout - lp` of its sampled tokens exceeds `sequence_mask_above` (DeepSeek-V3.2,
    2025, section 3.1). Without rollout log-probabilities, `q` is in their place.
    """

    def loss(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
        losses = compute(logprobs, inputs, config)
        cap, mask_above = config.get(IMPORTANCE_CAP, 0.0), config.get(SEQUENCE_MASK, 0.0)
        if not cap and not mask_above:
            return losses
        q, sampled = inputs["logprobs"], is_sampled(inputs)
        rollout = inputs.get(ROLLOUT, q)
        if cap:
            apart = torch.where(sampled, q - rollout, 0.0)
            losses = losses * torch.exp(apart).clamp(max=cap)
        if mask_above:
            lengths = lengths_of(logprobs, inputs)
            drifts = torch.where(sampled, rollout - logprobs.detach(), 0.0)
            mean = datum_sums(drifts, lengths) / datum_sums(sampled, lengths).clamp(min=1)
            is_far = of_each_row(mean > mask_above, lengths, logprobs) != 0
            losses = torch.where(is_far & (inputs["advantages"] < 0), 0.0, losses)
        return losses

    return loss


def is_sampled(inputs: Inputs) -> torch.Tensor:
    """Return True for tokens with an advantage or a `q` other than 0; prompts have neither."""
    return (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)


def sampled_tokens(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return the number of sampled tokens of each row's datum, at least 1, `[n, 1]`."""
    lengths = lengths_of(logprobs, inputs)
    return of_each_row(datum_sums(is_sampled(inputs), lengths).clamp(min=1), lengths, logprobs)


def lengths_of(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return the rows of each datum; without that input there is one datum."""
    lengths = inputs.get(DATUM_LENGTHS)
    return torch.full((1,), len(logprobs), device=logprobs.device) if lengths is None else lengths


def of_each_row(values: torch.Tensor, lengths: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the value of each row's datum, in the type of `logprobs`, `[n, 1]` for 2-D ones."""
    # The output size spares the host a wait for the lengths.
    rows = values.repeat_interleave(lengths, output_size=len(logprobs)).to(logprobs.dtype)
    return rows.reshape(-1, *[1] * (logprobs.ndim - 1))


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


def clipped_surrogate(apart: torch.Tensor, advantages: torch.Tensor, config: Config) -> torch.Tensor:
    """Return `-min(r * A, clip(r) * A)` of the ratios `r = exp(apart)`.

    Well above the upper bound a rewarded token's loss no longer depends on its ratio. The exponent stops
    there, as the slope of an infinite `r` would be `0 * inf`.
    """
    enough = math.log(max(config["clip_high_threshold"], 1.0)) + 1.0
    counts = torch.where(advantages > 0, apart.clamp(max=enough), apart)
    ratios = torch.exp(torch.where(advantages != 0, counts, 0.0))
    return -torch.minimum(ratios * advantages, clipped(ratios, config) * advantages)


def policy(
    compute: LossFn,
    defaults: Mapping[str, float] | None = None,
    *more: str,
    optional: tuple[str, ...] = (ROLLOUT,),
    per_token: bool = True,
    unbounded_for: tuple[int, ...] = (),
) -> LossSpec:
    """Return a policy loss with corrections, its settings, and the inputs that it reads next to POLICY_INPUTS."""
    settings = {**(defaults or {}), **CORRECTIONS}
    inputs = (*POLICY_INPUTS, *more)
    return LossSpec(compute, inputs, settings, optional, per_token, unbounded_for)


# The defaults of gspo are undocumented. It uses those of ppo, whose keys it shares.
LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(cross_entropy, ("weights",)),
    "importance_sampling": policy(corrected(importance_sampling), unbounded_for=(-1, 1)),
    "ppo": policy(corrected(ppo), RATIO_BOUNDS, unbounded_for=(-1,)),
    # One-sided, as in the current public documentation; earlier pages said 0.8 and 1.2.
    "cispo": policy(corrected(cispo), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": policy(corrected(dro), {"beta": 0.05}),
    "gspo": policy(corrected(gspo), RATIO_BOUNDS, "sequence_ratio_mask", per_token=False),
    "reinforce": policy(corrected(reinforce)),
    "grpo": policy(
        grpo, {**RATIO_BOUNDS, "beta": 0.0}, optional=(ROLLOUT, REFERENCE), per_token=False, unbounded_for=(-1,)
    ),
    # Token sums and a wider upper bound (Yu et al., 2025, arXiv:2503.14476); no KL.
    "dapo": policy(corrected(ppo), {**RATIO_BOUNDS, "clip_high_threshold": 1.28}, unbounded_for=(-1,)),
    "sapo": policy(corrected(sapo), {"tau_positive": 1.0, "tau_negative": 1.05}, per_token=False),
}


def loss_of(op: Pass, datums: Sequence[Datum]) -> LossSpec:
    """Return the loss of some datums of a pass, whose `loss_fn` is known."""
    if op.graph is not None:
        return LossSpec(loss_of_datums(op.graph, datums), (), per_token=False)
    loss = LOSSES[op.loss_fn]
    # A mask depends on the whole datum.
    masks = bool(op.loss_config.get(SEQUENCE_MASK))
    return replace(loss, per_token=False) if masks and loss.per_token else loss


def inputs_of(op: Pass, loss: LossSpec) -> tuple[str, ...]:
    """Return the inputs that a loss reads from the datums of a pass, with the optional ones that they have."""
    first = op.datums[0].inputs
    return (*loss.inputs, *(name for name in loss.optional if name in first))


def value_and_slope(
    loss: LossSpec, logprobs: torch.Tensor, inputs: Inputs, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss (float64 scalar) and its derivative by each log-probability."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        total = loss.compute(leaf, inputs, config).sum(dtype=torch.float64)
        (slope,) = torch.autograd.grad(total, leaf)
    return total.detach(), slope


def steepest_target(loss: LossSpec, logprobs: torch.Tensor, inputs: Inputs, config: Config) -> tuple[float, int]:
    """Return the largest absolute slope of the loss by a log-probability of one datum, and its flat index.

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


def refuse_pass(op: Pass, vocab_size: int, context_length: int) -> str | None:
    """Return why this pass cannot run, as a sentence for the tenant, or None."""
    if op.loss_fn not in LOSSES and op.graph is None:
        return f"Unknown loss_fn {op.loss_fn!r}; known are {', '.join(sorted(LOSSES))}."
    loss = loss_of(op, op.datums)
    unknown = sorted(set(op.loss_config) - set(loss.defaults))
    if unknown:
        return f"Loss {op.loss_fn!r} has no setting {unknown[0]!r}."
    if not op.datums:
        return None
    inputs = inputs_of(op, loss)
    if not any(refuse_shapes(op.loss_fn, inputs, datum, context_length) for datum in op.datums):
        ids = (datum.tokens for datum in op.datums), (datum.inputs[TARGETS] for datum in op.datums)
        everything = np.concatenate([each.ravel() for of_kind in ids for each in of_kind])
        if not refuse_outside("Token", everything, vocab_size):
            return None
    for at, datum in enumerate(op.datums):  # only an invalid pass pays for locating the fault
        if reason := refuse_shapes(op.loss_fn, inputs, datum, context_length) or refuse_tokens(datum, vocab_size):
            return f"{reason} (datum {at})."
    return None


def refuse_reverse_kl(
    op: ReverseKl, vocab_size: int, context_length: int, *, layout_of: Callable[[AdapterSpec], Layout]
) -> str | None:
    """Return why this reverse KL cannot run, as a sentence for the tenant, or None."""
    if not 0 < op.temperature < math.inf:
        return f"temperature is {op.temperature}; it must be positive and finite."
    reference = op.reference
    if reference and reference.flat.shape != (layout_of(reference.spec).size,):
        return "The reference was made for another base model."
    for at, datum in enumerate(op.datums):
        if reason := (
            refuse_kl_shapes(datum, context_length)
            or refuse_outside("Token", datum.tokens, vocab_size)
            or refuse_outside("Reference token", datum.reference, vocab_size)
        ):
            return f"{reason} (datum {at})."
    return None


def refuse_kl_shapes(datum: KlDatum, context_length: int) -> str | None:
    """Return the error in the lengths of a reverse KL's datum, or None."""
    for tokens in (datum.tokens, datum.reference):
        if not 0 < len(tokens) <= context_length:
            return f"A datum has 1 to {context_length} tokens, not {len(tokens)}"
    most = min(len(datum.tokens), len(datum.reference))
    if datum.weights.ndim != 1 or not 0 < len(datum.weights) <= most:
        return f"weights has shape {list(datum.weights.shape)}; there is room for 1 to {most} targets"
    return None


def refuse_shapes(name: str, inputs: Sequence[str], datum: Datum, context_length: int) -> str | None:
    """Return the error in the lengths and shapes of a datum, or None."""
    length = len(datum.tokens)
    if not 0 < length <= context_length:
        return f"A datum has 1 to {context_length} tokens, not {length}"
    if TARGETS not in datum.inputs:
        return f"Loss {name!r} needs loss_fn_inputs[{TARGETS!r}]"
    shape = datum.inputs[TARGETS].shape
    if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
        return f"{TARGETS} has shape {list(shape)}; it must be [{length}] or [{length}, K]"
    for wanted in inputs:
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
    return f"{name} id {tokens[tuple(where)]} at position {where[0]} is outside the vocabulary (0..{vocab_size - 1})"
