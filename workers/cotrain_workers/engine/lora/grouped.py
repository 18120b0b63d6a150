"""The backend `grouped`: a few launches per module, whatever the number of adapters.

A grouped product multiplies each group of rows with a matrix of its own. Segments are sorted by pack class,
so that each class is one range of rows (`Groups`), whose segments begin at multiples of 8 rows: the rows in
between, of filler, belong to the segment before them, for which they add zeros to its gradients; those at
the end have a group of zeros, as a grouped product leaves rows of no group uninitialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from cotrain_workers.engine.lora.groups import find_groups
from cotrain_workers.engine.lora.segmented import anchor
from cotrain_workers.engine.routing import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.engine.lora.groups import Groups
    from cotrain_workers.engine.routing import Segment


class GroupedLora:
    """The LoRA paths of one micro-batch. The order of the segments decides how many groups there are."""

    def __init__(self, segments: Sequence[Segment], rows: int, dtype: torch.dtype) -> None:
        self._groups = list(find_groups(segments, rows, dtype))
        self._groups_by_module: dict[str, list[Groups]] = {}
        self._kept_x: torch.Tensor | None = None  # what was multiplied for siblings yet to come
        self._kept_lows: dict[str, tuple[torch.Tensor, ...]] = {}

    def linear(
        self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`."""
        groups = self._groups_of(module)
        if not groups:
            return functional.linear(x, weight, bias)
        lows = self._take_lows(module, x, groups)
        out: torch.Tensor = GroupedLinear.apply(x, weight, bias, module, groups, *lows)  # type: ignore[no-untyped-call]  # torch gives it none
        return out

    def parts(self, module: str) -> Sequence[Part]:
        """Return the segments whose adapter trains `module`, as views into the packs."""
        return [
            Part(
                s.start,
                s.stop,
                groups.stacked.pair(module, slot, s.source.layout.rank),
                s.scale,
                s.grads[module] if s.grads else None,
            )
            for groups in self._groups_of(module)
            for s, slot in zip(groups.segments, groups.slots, strict=True)
        ]

    def _groups_of(self, module: str) -> list[Groups]:
        if module not in self._groups_by_module:
            self._groups_by_module[module] = [
                g for g in self._groups if module in g.stacked.layout.b
            ]
        return self._groups_by_module[module]

    def _take_lows(
        self, module: str, x: torch.Tensor, groups: Sequence[Groups]
    ) -> tuple[torch.Tensor, ...]:
        """Return `scale * x A^T` of a module, of each of the groups; the first sibling computes all."""
        if self._kept_x is not x or module not in self._kept_lows:
            siblings = groups[0].stacked.layout.siblings[module]
            needs_grad = any(each.rounds for each in groups)
            lows = SharedLow.apply(x, anchor(needs_grad), siblings, groups)  # type: ignore[no-untyped-call]  # torch gives it none
            size = len(groups)
            self._kept_x = x
            self._kept_lows = {
                name: lows[at * size : (at + 1) * size] for at, name in enumerate(siblings)
            }
        found = self._kept_lows.pop(module)
        if not self._kept_lows:
            self._kept_x = None
        return found


class SharedLow(torch.autograd.Function):
    """`scale * x [A_1; A_2; …]^T` for modules that read one `x`: one product per pack class."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        siblings: tuple[str, ...],
        groups: Sequence[Groups],
    ) -> tuple[torch.Tensor, ...]:
        """Return `[n, rank]` of each module and class, module by module."""
        ctx.save_for_backward(x)
        ctx.siblings, ctx.groups = siblings, groups
        lows = []
        for each in groups:
            stack = each.stacked.a(siblings).transpose(1, 2)
            low = functional.grouped_mm(each.take(x[0]), stack, offs=each.adapter_ends)
            lows.append(low.mul_(each.scales).chunk(len(siblings), dim=1))
        return tuple(low[at] for at in range(len(siblings)) for low in lows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`; add those of the A matrices to their arenas."""
        (x,) = ctx.saved_tensors
        products = []
        for at, each in enumerate(ctx.groups):
            low_grad = torch.cat(grads[at :: len(ctx.groups)], dim=1).mul_(each.scales)
            add_a(each, ctx.siblings, low_grad, each.take(x[0]))
            if ctx.needs_input_grad[0]:
                stack = each.stacked.a(ctx.siblings)
                products.append(functional.grouped_mm(low_grad, stack, offs=each.adapter_ends))
        gx = joined(products, ctx.groups, x) if ctx.needs_input_grad[0] else None
        return gx, None, None, None


class GroupedLinear(torch.autograd.Function):
    """`y = x W^T + b`, and `y += low B^T` on the rows of each pack class."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        module: str,
        groups: Sequence[Groups],
        *lows: torch.Tensor,
    ) -> torch.Tensor:
        """Return `y` `[1, T, out]`."""
        ctx.save_for_backward(weight, *lows)
        ctx.module, ctx.groups = module, groups
        y = functional.linear(x, weight, bias)
        for each, low in zip(groups, lows, strict=True):
            stack = each.stacked.b(module)
            each.take(y[0]).add_(functional.grouped_mm(low, stack, offs=each.adapter_ends))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradients of `x` and of each `low`; add those of the B matrices to their arenas."""
        weight, *lows = ctx.saved_tensors
        gy = grads[0][0].contiguous()  # a grouped product takes no expanded tensor
        gx = torch.mm(gy, weight)[None] if ctx.needs_input_grad[0] else None
        low_grads = []
        for each, low in zip(ctx.groups, lows, strict=True):
            rows = each.take(gy)
            stack = each.stacked.b(ctx.module).transpose(1, 2)
            low_grads.append(functional.grouped_mm(rows, stack, offs=each.adapter_ends))
            add_b(each, ctx.module, low, rows)
        return gx, None, None, None, None, *low_grads


def add_a(groups: Groups, siblings: Sequence[str], low_grad: torch.Tensor, x: torch.Tensor) -> None:
    """Add `low_grad^T x` of each segment to the A gradients of the modules that read `x`."""
    if not groups.rounds:
        return
    found = weight_gradient(groups, low_grad, x).chunk(len(siblings), dim=1)
    products = [of_module.unbind() for of_module in found]
    for each in groups.rounds:
        totals, added = [], []
        for module, of_module in zip(siblings, products, strict=True):
            for at, grads in each:
                totals.append(grads[module].a)
                added.append(of_module[at][: len(totals[-1])])
        torch._foreach_add_(totals, added)


def add_b(groups: Groups, module: str, low: torch.Tensor, gy: torch.Tensor) -> None:
    """Add `gy^T low` of each segment to the B gradients of a module."""
    if not groups.rounds:
        return
    # [segments, out, rank], transposed in memory as B is in an arena
    products = weight_gradient(groups, low, gy).transpose(1, 2).unbind()
    for each in groups.rounds:
        totals = [grads[module].b for _, grads in each]
        added = [
            products[at][:, : total.shape[1]] for (at, _), total in zip(each, totals, strict=True)
        ]
        torch._foreach_add_(totals, added)


def weight_gradient(groups: Groups, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left^T right` over the rows of each segment, fp32 `[segments, columns, columns]`.

    A product of a 16-bit type is rounded to it once; what is added up is fp32.
    """
    return functional.grouped_mm(left.t(), right, offs=groups.segment_ends).float()


def joined(
    products: Sequence[torch.Tensor], groups: Sequence[Groups], like: torch.Tensor
) -> torch.Tensor:
    """Put the rows of each group into one tensor like `like` `[1, T, …]`, zero elsewhere."""
    if len(products[0]) == like.shape[1]:
        return products[0][None]
    whole = torch.zeros_like(like)
    for each, product in zip(groups, products, strict=True):
        each.take(whole[0]).copy_(product)
    return whole
