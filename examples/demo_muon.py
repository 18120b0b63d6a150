"""Muon optimizer in fp32, for the training of the demo's base model.

torch's own Muon computes in bf16, which takes seconds per step on a CPU without bf16 instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum optimizer with orthogonalized updates: every direction moves by the same amount.

    Accepts only matrices, [rows, columns]. Matrices of the same shape are processed together.
    """

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Run one step at the rate of the schedule."""
        (group,) = self.param_groups
        by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for matrix in group["params"]:
            by_shape[matrix.shape].append(matrix)
        for (rows, columns), matrices in by_shape.items():
            moved = torch.stack([self._momentum(matrix, matrix.grad) for matrix in matrices])
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            for matrix, direction in zip(matrices, orthogonal(moved), strict=True):
                matrix.mul_(1 - group["lr"] * WEIGHT_DECAY).sub_(direction, alpha=rate)

    def _momentum(self, matrix: torch.Tensor, grad: Any) -> torch.Tensor:
        state = self.state[matrix]
        if not state:
            state["mean"] = torch.zeros_like(matrix)
        state["mean"].lerp_(grad, 1 - MOMENTUM)
        return grad.lerp(state["mean"], MOMENTUM)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of each matrix [n, rows, columns] near 1, by Newton-Schulz."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT  # the smaller Gram matrix costs less
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
