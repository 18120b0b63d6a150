"""Optimizer steps over flat arenas: AdamW for all adapters of a cycle together, and Muon for one after the other.

AdamW has the semantics of `torch.optim.AdamW`.

Muon is a momentum whose matrices are orthogonalized. Its rule is that of Jordan et al. (2024,
kellerjordan.github.io/posts/muon) with Nesterov momentum, and the step size of Liu et al. (2025, arXiv:2502.16982,
section 2.2), so that learning rates of AdamW carry over. `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`
computes the same in bfloat16; here everything has the precision of the arenas.

The result of an adapter does not depend on the others: the launches work on lists of arenas, each
with its own norm, step count and elements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.optim.adamw import adamw

from cotrain_workers.engine.adapters.adapter import Adapter, discard_gradients
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.ops import Failure, OpId, OptimStep, Output, StepOutput, unknown_run

CLIP_EPS = 1e-6  # same as torch.nn.utils.clip_grad_norm_
#: An Adam step moves a weight by about its learning rate. Above this rate the weights are checked
#: after the step, which costs a copy of the adapter.
SAFE_LEARNING_RATE = 1e3
#: Newton-Schulz iterations of Muon.
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def refuse_step(op: OptimStep) -> str | None:
    """Return why this step cannot be taken, as a sentence for the tenant, or None."""
    checks = {
        "learning_rate": op.learning_rate >= 0,
        "beta1": 0 <= op.beta1 < 1,
        "beta2": 0 <= op.beta2 < 1,
        "eps": op.eps > 0,  # 0 / 0 would be NaN wherever a gradient has always been zero
        "weight_decay": op.weight_decay >= 0,
        "grad_clip_norm": op.grad_clip_norm >= 0,
    }
    for name, is_in_range in checks.items():
        if not (is_in_range and math.isfinite(getattr(op, name))):
            return f"Optimizer parameter {name}={getattr(op, name)} is out of range."
    return None


def refuse_type(op: OptimStep, adapter: Adapter) -> str | None:
    """Return why a step is not of its run's optimizer, or None."""
    own = adapter.spec.optimizer
    if op.type == own:
        return None
    remedy = {"adamw": "send adam_params", "muon": 'send optimizer_params with type "muon" (MuonParams)'}
    return f"The run was created with optimizer {own}, not {op.type}: {remedy.get(own, '')}."


@dataclass(frozen=True)
class Due:
    """Valid step: its parameters are in range, and Adam can hold its gradient."""

    adapter: Adapter
    op: OptimStep
    norm: float  # of the gradient

    @property
    def clipped_norm(self) -> float:
        """L2 norm of the gradient after clipping."""
        limit = self.op.grad_clip_norm
        return min(self.norm, limit) if limit > 0 else self.norm

    @property
    def is_risky(self) -> bool:
        """True if one step with these parameters may make weights too large."""
        op = self.op
        return op.learning_rate > SAFE_LEARNING_RATE or op.learning_rate * op.weight_decay > 2


def largest_norm(adapter: Adapter) -> float:
    """Return the largest norm of a gradient that Adam can hold.

    The second moment is a mean of squares, so it stays finite if every square is. An infinite one never
    becomes finite again, and its weight would never move again.
    """
    return math.sqrt(torch.finfo(adapter.weights.dtype).max) / 2


def gradient_norms(adapters: Sequence[Adapter]) -> list[float]:
    """Return the L2 norm of each adapter's whole gradient, added up in fp64. Waits for the device, once."""
    if not adapters:
        return []
    if adapters[0].gradient.is_cuda:
        gradients = [adapter.gradient.flat for adapter in adapters]
        norms = torch._foreach_norm(gradients, dtype=torch.float64)  # has no public name
    else:
        norms = tuple(adapter.gradient.norm() for adapter in adapters)
    on_host: list[float] = torch.stack(norms).tolist()
    return on_host


def adamw_steps(steps: Sequence[Due]) -> None:
    """Clip each gradient by its global norm, update weights, moments and step counts, and discard the gradients.

    Steps of equal parameters share one launch. Each adapter may occur only once. Without a
    gradient the step has zero gradients: moments and weights decay, and nothing fails.
    """
    clip([due for due in steps if due.op.grad_clip_norm > 0 and due.norm > 0])
    for group in by_parameters([due for due in steps if due.op.type == "adamw"]):
        launch(group)
    for due in steps:
        if due.op.type == "muon":
            muon_step(due.adapter, due.op)
    for due in steps:
        due.adapter.step += 1
        due.adapter.weights_changed()
    discard_gradients([due.adapter for due in steps])


def clip(steps: Sequence[Due]) -> None:
    """Scale down the gradients that exceed their steps' limits."""
    factors = [min(1.0, due.op.grad_clip_norm / (due.norm + CLIP_EPS)) for due in steps]
    if factors:
        torch._foreach_mul_([due.adapter.gradient.flat for due in steps], factors)


def by_parameters(steps: Sequence[Due]) -> list[list[Due]]:
    """Group the steps by the parameters that a launch shares; clipping is done before."""
    groups: dict[tuple[float, ...], list[Due]] = {}
    for due in steps:
        op = due.op
        key = (op.learning_rate, op.beta1, op.beta2, op.eps, op.weight_decay)
        groups.setdefault(key, []).append(due)
    return list(groups.values())


def launch(steps: Sequence[Due]) -> None:
    """Update weights and moments by steps with the same parameters, each adapter at its own step count."""
    op, adapters = steps[0].op, [due.adapter for due in steps]
    counts = torch.tensor([float(adapter.step) for adapter in adapters])
    adamw(
        [adapter.weights for adapter in adapters],
        [adapter.gradient.flat for adapter in adapters],
        [adapter.m for adapter in adapters],
        [adapter.v for adapter in adapters],
        [],
        list(to_device(counts, adapters[0].weights.device).unbind()),
        fused=True,
        amsgrad=False,
        beta1=op.beta1,
        beta2=op.beta2,
        lr=op.learning_rate,
        weight_decay=op.weight_decay,
        eps=op.eps,
        maximize=False,
    )


def take_steps(adapters: Mapping[str, Adapter], ops: Sequence[OptimStep], outputs: dict[OpId, Output]) -> None:
    """Run optimizer steps, at most one per run, and write an output for each; `adapters` are by run.

    A gradient that is not finite, or too large for Adam, is discarded, and its step fails alone. A step that would make
    weights too large for products fails, too, and leaves the adapter unchanged.
    """
    asked = []
    for op in ops:
        if op.run not in adapters:
            outputs[op.id] = unknown_run()
        elif reason := refuse_step(op) or refuse_type(op, adapters[op.run]):
            outputs[op.id] = Failure(reason, "user")
        else:
            asked.append(op)
    norms = gradient_norms([adapters[op.run] for op in asked])
    due: list[Due] = []
    refused: list[Adapter] = []
    for op, norm in zip(asked, norms, strict=True):
        step = Due(adapters[op.run], op, norm)
        failure = refuse_gradient(step)
        if failure:
            outputs[op.id] = failure
            refused.append(step.adapter)
        else:
            outputs[op.id] = StepOutput(norm)
            due.append(step)
    before = [(step, _copy_of(step.adapter)) for step in due if step.is_risky]
    adamw_steps(due)
    for step, (weights, m, v, count) in before:
        adapter = step.adapter
        if not float(adapter.weights.abs().max()) <= largest_norm(adapter):
            adapter.weights.copy_(weights)
            adapter.m.copy_(m)
            adapter.v.copy_(v)
            adapter.step = count
            adapter.weights_changed()
            outputs[step.op.id] = too_long(step.op)
    discard_gradients(refused)


def _copy_of(adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    return adapter.weights.clone(), adapter.m.clone(), adapter.v.clone(), adapter.step


def refuse_gradient(step: Due) -> Failure | None:
    """Return the failure of a step whose gradient is not finite or too large for Adam, or None."""
    seq, limit = step.op.seq, largest_norm(step.adapter)
    if not math.isfinite(step.norm):
        message = f"Gradient is not finite (seq {seq}); it was discarded."
    elif step.clipped_norm > limit:
        message = (
            f"Gradient is too large for Adam (seq {seq}): its norm is {step.norm:.3g}, and the square must fit"
            f" {str(step.adapter.weights.dtype).removeprefix('torch.')}, so the limit is {limit:.3g}. It was"
            " discarded. Set grad_clip_norm, or correct the data."
        )
    else:
        return None
    steepest = step.adapter.steepest
    return Failure(f"{message} {steepest}" if steepest else message, "user", "not_finite")


def too_long(op: OptimStep) -> Failure:
    """Return the failure of a step that would make products of weights infinite."""
    return Failure(
        f"Step would make weights infinite or nearly so (seq {op.seq}, learning_rate={op.learning_rate:g}, "
        f"weight_decay={op.weight_decay:g}, eps={op.eps:g}). It was discarded with its gradient; the weights "
        "are as before. Use a smaller learning_rate.",
        "user",
        "not_finite",
    )


def muon_step(adapter: Adapter, op: OptimStep) -> None:
    """Update the weights and the momentum of one adapter; `op.beta1` is the momentum.

    The momentum is in the arena of Adam's first moments. The second moments stay zero.
    """
    gradient = adapter.gradient.flat
    adapter.m.lerp_(gradient, 1 - op.beta1)
    updates = adapter.layout.views(gradient.lerp(adapter.m, op.beta1))
    adapter.weights.mul_(1 - op.learning_rate * op.weight_decay)
    weights = adapter.layout.views(adapter.weights)
    pairs = []
    for name, update in updates.items():
        # Matrices lie in the arena with their ranks as rows.
        pairs += [(update.a, weights[name].a), (update.b.mT, weights[name].b.mT)]
    matrices = [(_stacked(each), _stacked(target)) for each, target in pairs]
    matrices.sort(key=lambda each: each[0].shape[1:])  # stable, so the order is the model's
    for (rows, width), group in groupby(matrices, key=lambda each: each[0].shape[1:]):
        _update(list(group), op.learning_rate * 0.2 * max(rows, width) ** 0.5)


def _update(group: Sequence[tuple[torch.Tensor, torch.Tensor]], rate: float) -> None:
    """Update matrices of one shape, with one product for all of them."""
    directions = orthogonalized(torch.cat([update for update, _ in group]))
    start = 0
    for update, weights in group:
        weights.sub_(directions[start : start + len(update)], alpha=rate)
        start += len(update)


def _stacked(matrices: torch.Tensor) -> torch.Tensor:
    """Return a view `[n, rank, width]`; only experts have several matrices."""
    return matrices[None] if matrices.ndim == 2 else matrices


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices `[n, r, w]` with singular values of about 1, by Newton-Schulz iterations. Zeros stay zeros."""
    x: torch.Tensor = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=EPS)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x
