"""One AdamW step of one adapter over its flat arenas, with the semantics of `torch.optim.AdamW`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.optim.adamw import adamw

if TYPE_CHECKING:
    from cotrain_workers.bank import Adapter
    from cotrain_workers.ops import OptimStep

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def refuse_step(op: OptimStep) -> str | None:
    """Return why this step cannot be taken, as a sentence for the tenant, or None."""
    checks = {
        "learning_rate": op.learning_rate >= 0,
        "beta1": 0 <= op.beta1 < 1,
        "beta2": 0 <= op.beta2 < 1,
        "eps": op.eps > 0,  # 0 / 0 would be NaN wherever a gradient has always been zero
        "weight_decay": op.weight_decay >= 0,
        "grad_clip_norm": True,
    }
    for name, is_in_range in checks.items():
        if not (is_in_range and math.isfinite(getattr(op, name))):
            return f"Optimizer parameter {name}={getattr(op, name)} is out of range."
    return None


def gradient_norm(adapter: Adapter) -> float:
    """Return the L2 norm over the whole gradient, added up in fp64. Waits for the device."""
    return float(torch.linalg.vector_norm(adapter.gradient.flat, dtype=torch.float64))


def adamw_step(adapter: Adapter, op: OptimStep, norm: float) -> None:
    """Clip by the global norm, update weights, moments and step count, and zero the gradient.

    Without a gradient it is a step with zero gradients: moments and weights decay, nothing fails.
    """
    gradient = adapter.gradient.flat
    if op.grad_clip_norm > 0 and norm > 0:
        gradient.mul_(min(1.0, op.grad_clip_norm / (norm + CLIP_EPS)))
    adamw(
        [adapter.weights],
        [gradient],
        [adapter.m],
        [adapter.v],
        [],
        [torch.tensor(float(adapter.step), device=gradient.device)],
        fused=True,
        amsgrad=False,
        beta1=op.beta1,
        beta2=op.beta2,
        lr=op.learning_rate,
        weight_decay=op.weight_decay,
        eps=op.eps,
        maximize=False,
    )
    adapter.step += 1
    discard_gradient(adapter)
    adapter.weights_changed()


def discard_gradient(adapter: Adapter) -> None:
    """Zero the gradient."""
    adapter.gradient.flat.zero_()
    adapter.grads_pending = False
