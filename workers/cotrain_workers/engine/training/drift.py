"""Distance of the trained policy from the one that sampled, as metrics of a pass.

They are computed on the host from the log-probabilities that the pass returns anyway, so no result changes.

`lp` is the log-probability of a target in the pass, `q` the one at sampling, and `r = exp(lp - q)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cotrain_workers.engine.ops import Pass
from cotrain_workers.engine.training.losses import LOSSES, POLICY_INPUTS, RATIO_BOUNDS

#: Input of any loss: the optimizer step whose weights sampled each target, or -1.
POLICY_STEP = "policy_step"
LAG_METRICS = ("policy_lag:mean", "policy_lag:max")


def drift(op: Pass, found: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the drift of a pass with a policy loss; {} for other losses, or without sampled tokens.

    Sampled tokens have an advantage or a `q` other than 0; prompts have neither.

    * `sampled_tokens:sum`: number of sampled tokens.
    * `rollout_gap:mean`, `rollout_gap:max` and `rollout_gap_p99:max`: `|lp - q|` of sampled tokens, in nats.
    * `effective_sample_size:mean`: `(sum r)^2 / (n sum r^2)` of sampled tokens, 1 without drift (Kish, 1965).
    * `clip_fraction:mean`: share of the tokens with an advantage whose ratio is out of bounds, where the
      bound removes its gradient or replaces its ratio; only of losses with bounds.
    * With `rollout_logprobs`, the gap is from those, and `policy_gap:mean` is from `q`, the trainer's own. The weights
      `exp(q - rollout)` have the mean `importance_weight:mean`, and the share `importance_capped:mean` above the cap.
    """
    loss = LOSSES[op.loss_fn]
    if not set(POLICY_INPUTS) <= set(loss.inputs) or not op.datums:
        return {}
    q, advantages = (_flat([datum.inputs[name] for datum in op.datums]) for name in POLICY_INPUTS)
    apart = _flat(found) - q
    has_rollout = "rollout_logprobs" in op.datums[0].inputs
    rollout = _flat([d.inputs["rollout_logprobs"] for d in op.datums]) if has_rollout else q
    is_sampled = (advantages != 0) | (q != 0)
    if not is_sampled.any():
        return {}
    gap = np.abs((_flat(found) - rollout)[is_sampled])
    ratios = np.exp(apart[is_sampled] - apart[is_sampled].max())  # a common factor cancels
    metrics = {
        "sampled_tokens:sum": float(len(gap)),
        "rollout_gap:mean": float(gap.mean()),
        "rollout_gap:max": float(gap.max()),
        "rollout_gap_p99:max": float(np.quantile(gap, 0.99)),
        "effective_sample_size:mean": float(ratios.sum() ** 2 / (len(ratios) * np.square(ratios).sum())),
    }
    if has_rollout:
        mismatch = (q - rollout)[is_sampled]
        weights = np.exp(mismatch.clip(max=80.0))
        metrics["policy_gap:mean"] = float(np.abs(apart[is_sampled]).mean())
        metrics["importance_weight:mean"] = float(weights.mean())
        cap = op.loss_config.get("importance_cap", 0.0)
        if cap > 0:
            metrics["importance_capped:mean"] = float((weights > cap).mean())
    is_rewarded = advantages != 0
    if set(RATIO_BOUNDS) <= set(loss.defaults) and is_rewarded.any():
        if "sequence_ratio_mask" in loss.inputs:
            apart = _of_sequences(op, found)
        is_clipped = _is_clipped(op.loss_fn, apart, advantages, {**loss.defaults, **op.loss_config})
        metrics["clip_fraction:mean"] = float(is_clipped[is_rewarded].mean())
    return metrics


def has_policy_steps(op: Pass) -> bool:
    """Return True if a datum of a pass has a `policy_step`."""
    return any(POLICY_STEP in datum.inputs for datum in op.datums)


def lag_sums(op: Pass) -> dict[str, float]:
    """Return the number of targets with a `policy_step`, and the sum and maximum of their lags; {} without steps.

    A lag is the number of optimizer steps between sampling and training. It is negative for a sample of a later step,
    which a rewind of the run has abandoned.
    """
    steps = _flat([each.inputs[POLICY_STEP] for each in op.datums if POLICY_STEP in each.inputs])
    steps = steps[steps >= 0]
    if op.step is None or not len(steps):
        return {}
    lags = op.step - steps
    return {"lagged": float(len(lags)), "lag": float(lags.sum()), "lag_max": float(lags.max())}


def lag(op: Pass) -> dict[str, float]:
    """Return the LAG_METRICS of a pass, its staleness in optimizer steps; {} without steps."""
    sums = lag_sums(op)
    return dict(zip(LAG_METRICS, (sums["lag"] / sums["lagged"], sums["lag_max"]), strict=True)) if sums else {}


def _is_clipped(loss_fn: str, apart: np.ndarray, advantages: np.ndarray, config: Mapping[str, float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        low, high = np.log([config["clip_low_threshold"], config["clip_high_threshold"]])
    below, above = apart < low, apart > high
    if loss_fn != "cispo":  # which bounds the weight, whatever the sign of the advantage
        below, above = below & (advantages < 0), above & (advantages > 0)
    clipped: np.ndarray = below | above
    return clipped


def _of_sequences(op: Pass, found: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean of `lp - q` over the masked tokens of its datum, for each target."""
    means = []
    for datum, now in zip(op.datums, found, strict=True):
        masked = datum.inputs["sequence_ratio_mask"] != 0
        apart = (now - datum.inputs["logprobs"])[masked].sum(dtype=np.float64)
        means.append(np.full(now.shape, apart / max(1, np.count_nonzero(masked))))
    return _flat(means)


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(array.ravel() for array in arrays)]).astype(np.float64)
