"""Outputs of complete passes, and the messages of failed ones."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from cotrain_workers.engine.adapters.adapter import Adapter, Steepest
from cotrain_workers.engine.ops import Failure, Pass, PassOutput, ReverseKl, ReverseKlOutput
from cotrain_workers.engine.training.custom_loss import broken_datum, custom_metrics
from cotrain_workers.engine.training.drift import drift, lag
from cotrain_workers.engine.training.losses import inputs_of, loss_of, steepest_target

#: Limit of an exponent: exp of more is infinite in float32, or leaves a gradient no range.
FAR_APART = 80.0
#: Weights above this explain a loss that is not finite better than the data.
LARGE_WEIGHT = 1e6


def output_of(
    op: Pass | ReverseKl, found: Sequence[np.ndarray], loss_sum: float, rows: int
) -> PassOutput | ReverseKlOutput:
    """Return the output of a complete pass of `rows` rows; `found` are log-probabilities or divergences, per datum."""
    if not isinstance(op, ReverseKl):
        metrics = drift(op, found) if op.graph is None else custom_metrics(op.graph, op.datums, found)
        tokens = sum(len(datum.tokens) for datum in op.datums)
        return PassOutput(found, loss_sum, {**metrics, **lag(op)}, tokens - rows)
    weights = [datum.weights for datum in op.datums]
    return ReverseKlOutput(
        losses=[w * kl for w, kl in zip(weights, found, strict=True)],
        loss_sum=loss_sum,
        kl_sum=float(sum(kl.sum(dtype=np.float64) for kl in found)),
        weighted_tokens=sum(int(np.count_nonzero(w)) for w in weights),
    )


def memory_failure(tokens: int) -> Failure:
    """Return the failure of a pass with a datum of `tokens` tokens that does not fit into memory."""
    return Failure(f"Request needs more memory than the worker has ({tokens} tokens).", "server")


def record_steepest(adapter: Adapter, op: Pass, found: Sequence[np.ndarray]) -> None:
    """Store the steepest target of a pass with the adapter, unless an earlier pass has a steeper one."""
    for number, (datum, now) in enumerate(zip(op.datums, found, strict=True)):
        loss = loss_of(op, [datum])
        config = {**loss.defaults, **op.loss_config}
        inputs = {name: torch.from_numpy(datum.inputs[name]) for name in inputs_of(op, loss)}
        slope, at = steepest_target(loss, torch.from_numpy(now), inputs, config)
        if adapter.steepest is None or slope > adapter.steepest.slope:
            index = ", ".join(str(axis) for axis in np.unravel_index(at, now.shape))
            recorded = datum.inputs["logprobs"].flat[at] if "logprobs" in loss.inputs else None
            adapter.steepest = Steepest(op.seq, number, index, slope, float(now.flat[at]), recorded)


def not_finite(op: Pass | ReverseKl, found: Sequence[np.ndarray], adapter: Adapter) -> Failure:
    """Return the failure of a pass whose loss, log-probabilities or gradient are not finite."""
    discarded = "; the gradient was discarded" if op.needs_grad else ""
    why = broken_weights(adapter)
    if not why and isinstance(op, Pass):
        if op.graph is None:
            why = too_far_apart(op, found)
        else:
            why = broken_datum(op.graph, op.datums, found, needs_grad=op.needs_grad)
    return Failure(f"Loss is not finite (seq {op.seq}){discarded}.{why}", "user", "not_finite")


def broken_weights(adapter: Adapter) -> str:
    """Return a sentence on weights that are not finite or far too large, with the remedy; "" for others."""
    low, high = adapter.weights.aminmax()
    largest = max(-float(low), float(high))
    if largest <= LARGE_WEIGHT:
        return ""
    state = f"reach {largest:.3g}" if math.isfinite(largest) else "are not finite"
    return (
        f" The run's own weights {state}, so every pass fails: load an earlier checkpoint (load_state), or make"
        " a new run, and step with a smaller learning_rate."
    )


def too_far_apart(op: Pass, found: Sequence[np.ndarray]) -> str:
    """Return a sentence on the first target whose ratio exceeds float32, with the remedy; "" if there is none."""
    signs = loss_of(op, op.datums).unbounded_for
    for number, (datum, now) in enumerate(zip(op.datums, found, strict=True)):
        if not signs:
            break
        then, advantages = datum.inputs["logprobs"], datum.inputs["advantages"]
        (far,) = np.nonzero(np.isin(np.sign(advantages), signs) & (now - then > FAR_APART))
        if len(far):
            target = int(far[0])
            return (
                f" data[{number}].loss_fn_inputs.logprobs[{target}] is {then[target]:.6g}, and the target's"
                f" log-probability is {now[target]:.6g} now: {op.loss_fn} multiplies by exp of the"
                " difference, which float32 cannot hold. Set that token's advantage to 0, or use cispo,"
                " which bounds the ratio."
            )
    return ""
