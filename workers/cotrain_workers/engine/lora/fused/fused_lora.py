"""The backend `fused`: LoRA inside the base model's products, so that each result is written once.

A module is computed together with those that read the same `x`: two launches forward and four back, whatever
the number of adapters. Tiles belong to one adapter each and begin where its segment does, and the base
model's part is the same kernel for all: a row's bits depend on its own tile alone, on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cotrain_workers.engine.lora.fused import operators  # noqa: F401  # it registers the ops
from cotrain_workers.engine.lora.fused.tables import make_tables
from cotrain_workers.engine.lora.segmented import SegmentLora, anchor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_workers.engine.lora.fused.tables import ModuleGroup, Tables
    from cotrain_workers.engine.routing import LinearWeights, Part, Segment

A, B = 0, 1  # which of an adapter's matrices


class FusedLora:
    """The LoRA paths of one micro-batch, over the modules of a base model by name."""

    def __init__(
        self,
        segments: Sequence[Segment],
        rows: int,
        groups: Sequence[ModuleGroup],
        linears: Mapping[str, LinearWeights],
    ) -> None:
        self._segments = SegmentLora(segments)
        self._all = segments  # their arenas live as long as the addresses of them
        self._rows, self._groups, self._linears = rows, groups, linears
        self._group_of = {name: group for group in groups for name in group.names}
        self._tables: Tables | None = None
        self._kept_x: torch.Tensor | None = None  # what siblings yet to come were computed of
        self._kept: dict[str, torch.Tensor] = {}

    def linear(
        self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`; the first of siblings computes all."""
        if self._kept_x is not x or module not in self._kept:
            self._kept_x, self._kept = x, self._compute(self._group_of[module], x)
        found = self._kept.pop(module)
        if not self._kept:
            self._kept_x = None
        return found

    def parts(self, module: str) -> Sequence[Part]:
        """Return the segments whose adapter trains `module`."""
        return self._segments.parts(module)

    def _compute(self, group: ModuleGroup, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._tables is None:
            self._tables = make_tables(self._all, self._rows, self._groups, x.device)
        linears = [self._linears[name] for name in group.names]
        columns = self._tables.columns(group)
        is_trained = columns > 0 and len(self._tables.owners) > 1
        ys = FusedLinears.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
            x.squeeze(0),
            anchor(is_trained),
            group,
            self._tables,
            [each.bias for each in linears if each.bias is not None],
            *(each.weight for each in linears),
        )
        return {name: y.unsqueeze(0) for name, y in zip(group.names, ys, strict=True)}


class FusedLinears(torch.autograd.Function):
    """`y = x W^T + b + scale * (x A^T) B^T` of modules that read one `x`, each row with its own A and B."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        group: ModuleGroup,
        tables: Tables,
        biases: Sequence[torch.Tensor],
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return `[T, out]` of each module."""
        ops, entries, count = torch.ops.cotrain, tables.of(group), len(weights)
        assert len(biases) in (0, count)
        x = x.contiguous()
        low = ops.lora_shrink([x], count, A, tables.tiles, entries, tables.columns(group))
        ys = ops.lora_expand(x, weights, biases, low, tables.tiles, entries, tables.scales)
        ctx.save_for_backward(x, low, *weights)
        ctx.group, ctx.tables = group, tables
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`; add those of the LoRA matrices to their arenas."""
        x, low, *weights = ctx.saved_tensors
        ops, tables, count = torch.ops.cotrain, ctx.tables, len(weights)
        entries, columns = tables.of(ctx.group), tables.columns(ctx.group)
        gys = [grad.contiguous() for grad in grads]
        low_grad = ops.lora_shrink(gys, count, B, tables.tiles, entries, columns)
        if ctx.needs_input_grad[1]:
            own = (tables.owners, tables.members, tables.spans, entries, tables.scales)
            ops.lora_add_gradient(low, gys, count, B, *own)
            ops.lora_add_gradient(low_grad, [x], count, A, *own)
        gx = None
        if ctx.needs_input_grad[0]:
            gx = ops.lora_expand_back(gys, weights, low_grad, tables.tiles, entries, tables.scales)
        return gx, *[None] * (4 + count)
