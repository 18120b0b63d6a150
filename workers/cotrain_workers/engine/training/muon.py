"""Muon: momentum whose matrices are orthogonalized, for the LoRA matrices of one adapter.

The rule is that of Jordan et al. (2024, kellerjordan.github.io/posts/muon) with Nesterov momentum, and the step size of Liu et
al. (2025, arXiv:2502.16982, section 2.2), so that learning rates of AdamW carry over. `torch.optim.Muon` with
`adjust_lr_fn="match_rms_adamw"` computes the same in bfloat16; here everything has the precision of the arenas.
"""

from collections.abc import Sequence
from itertools import groupby

import torch

from cotrain_workers.engine.adapters.adapter import Adapter
from cotrain_workers.engine.ops import OptimStep

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


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
