"""Frozen linear module with many adapters, and the backend `seg`: a loop of GEMMs over segments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from cotrain_workers.engine.lora.quantized import (
    FrozenWeight,
    QuantizedLinear,
    dense,
    frozen_linear,
    keep_weight,
    kept_weight,
)
from cotrain_workers.engine.routing import Part, Router, Segment
from cotrain_workers.engine.spec import kept_share


class MultiLoraLinear(nn.Module):
    """A frozen linear module that adds to each row the LoRA path of the row's adapter."""

    def __init__(self, base: nn.Linear | QuantizedLinear, name: str, router: Router) -> None:
        super().__init__()
        self.weight: Any = base.weight  # a tensor, or a QuantizedWeight, which only some backends take
        self.bias = base.bias
        self.name = name
        self.router = router
        router.linears[name] = self

    # typing.override requires Python 3.12
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[explicit-override]
        """Map `x` `[1, T, in]` to `[1, T, out]`; models also pass `[T, in]` or `[1, 1, T, in]`."""
        if x.ndim != 3:
            row = self(x.reshape(1, -1, x.shape[-1]))
            return row.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
        if self.router.step is not None:
            return self.router.step.linear(self.name, x, self.weight, self.bias)
        return self.router.route.lora.linear(self.name, x, self.weight, self.bias)


class SegmentLora:
    """The backend `seg`: small GEMMs, segment by segment. Reference for any type, rank and width."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = [(segment, segment.source.compute) for segment in segments]
        self._parts_by_module: dict[str, list[Part]] = {}

    def linear(self, module: str, x: torch.Tensor, weight: FrozenWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`."""
        parts = self.parts(module)
        if not parts:
            return frozen_linear(x, weight, bias)
        out: torch.Tensor = SegmentedLora.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
            x, anchor(any(part.grads for part in parts)), weight, bias, parts
        )
        return out

    def parts(self, module: str) -> Sequence[Part]:
        """Return the segments whose adapter trains `module`."""
        if module not in self._parts_by_module:
            self._parts_by_module[module] = [
                Part(s.start, s.stop, matrices[module], s.scale, s.grads[module] if s.grads else None)
                for s, matrices in self._segments
                if module in matrices
            ]
        return self._parts_by_module[module]


def anchor(needs_grad: bool) -> torch.Tensor:
    """Return an input that makes autograd record a node even if no other input requires a gradient.

    The LoRA matrices are views into arenas, not autograd leaves, and in the first layer of a frozen base
    `x` requires no gradient.
    """
    return torch.empty(0, requires_grad=needs_grad)


class SegmentedLora(torch.autograd.Function):
    """`y = x W^T + b`, and `y += scale (x A^T) B^T` on the rows of each part.

    Weight gradients are added to the parts' arenas, segment by segment, so their sums depend only on the
    segment. The content of a neighbouring segment cannot change a bit of them.
    """

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weight: FrozenWeight,
        bias: torch.Tensor | None,
        parts: Sequence[Part],
    ) -> torch.Tensor:
        """Return `y` `[1, T, out]`."""
        y = functional.linear(x, dense(weight), bias)
        cuts = Cuts.of(parts, x.shape[1])
        # Columns of transposes, the layout of the products: one call less per part than transposing each.
        each = zip(parts, cuts.columns(x[0].t()), cuts.columns(y[0].t()), strict=True)
        lows = []
        for (_, _, weights, scale, _), columns, out in each:
            # [rank, n]: a third faster on CPU than its transpose
            low = torch.mm(weights.a, columns)
            out.addmm_(weights.b, low, alpha=scale)
            lows.append(low)
        keep_weight(ctx, weight, x, *lows)
        ctx.parts, ctx.cuts = parts, cuts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`; add the gradients of the LoRA matrices to their arenas."""
        weight, (x, *lows) = kept_weight(ctx)
        gy, cuts = grads[0][0], ctx.cuts
        gx = torch.mm(gy, weight) if ctx.needs_input_grad[0] else None
        outs = repeat(None) if gx is None else cuts.columns(gx.t())
        parts: Sequence[Part] = ctx.parts
        each = zip(parts, lows, cuts.columns(gy.t()), cuts.rows(x[0]), outs, strict=False)
        for (_, _, weights, scale, sums), low, gyt, rows, out in each:
            low_grad = torch.mm(weights.bt, gyt)  # [rank, n]
            if sums is not None:
                share = kept_share(sums)
                add_product(sums.b, gyt, low.t(), scale, share)
                add_product(sums.a, low_grad, rows, scale, share)
            if out is not None:
                out.addmm_(weights.at, low_grad, alpha=scale)
        return None if gx is None else gx[None], None, None, None, None


class Cuts(NamedTuple):
    """Split sizes of a packed row for one view per part; a slice per part takes several times as long."""

    sizes: list[int]  # sizes of the parts, and of the rows before, between and after them
    wanted: list[int]  # indices of the parts in `sizes`

    @classmethod
    def of(cls, parts: Sequence[Part], length: int) -> Cuts:
        """Return the cuts for parts in row order, in a packed row of some length."""
        sizes: list[int] = []
        wanted: list[int] = []
        end = 0
        for part in parts:
            if part.start > end:
                sizes.append(part.start - end)
            wanted.append(len(sizes))
            sizes.append(part.stop - part.start)
            end = part.stop
        return cls([*sizes, length - end], wanted)

    def rows(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows `[n, …]` of each part of `x` `[T, …]`."""
        cut = x.split_with_sizes(self.sizes)
        return [cut[at] for at in self.wanted]

    def columns(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the columns `[…, n]` of each part of `x` `[…, T]`."""
        cut = x.split_with_sizes(self.sizes, dim=1)
        return [cut[at] for at in self.wanted]


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, share: int = 1) -> None:
    """Set `total` to `share * total + scale * left @ right`, in its precision; it is an fp32 or fp64 arena view.

    If `share` is 0, the old value is not read: it may be NaN.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=share, alpha=scale)
        return
    if not share:
        total.zero_()
    total.add_(wide_product(left, right), alpha=scale)


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right` of 16-bit matrices in fp32, without rounding the result to 16 bits."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())
