"""The backend `fused`: LoRA inside the base model's products, so that each result is written once.

Modules that read the same `x` are computed together: two launches forward and four backward, for any number of
adapters. A tile belongs to one adapter and starts at its segment's first row, and all tiles use the same kernel
for the base model's part. The bits of a row therefore depend only on its own tile, on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cotrain_workers.engine.lora.fused import operators  # noqa: F401  # it registers the ops
from cotrain_workers.engine.lora.fused.fused_experts import ExpertProducts, FusedExperts, find_probes, sort_rows
from cotrain_workers.engine.lora.fused.tables import A, B, ModuleGroup, Tables, make_tables
from cotrain_workers.engine.lora.quantized import FrozenWeight, dense, keep_weights, kept_weights
from cotrain_workers.engine.lora.segmented import SegmentLora, anchor
from cotrain_workers.engine.lora.siblings import SiblingResults
from cotrain_workers.engine.routing import ExpertWeights, LinearWeights, Part, Segment


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
        self._all = segments  # a reference, so that their arenas outlive the addresses in the tables
        self._rows, self._groups, self._linears = rows, groups, linears
        self._group_of = {name: group for group in groups for name in group.names}
        self._tables: Tables | None = None
        self._probes: dict[int, torch.Tensor] = {}  # by number of experts
        self._outputs = SiblingResults[torch.Tensor]()
        self._residuals: dict[str, torch.Tensor] = {}  # by the module to whose output they are added

    def linear(self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`; the first sibling computes the outputs of all."""
        return self._outputs.take(module, x, lambda: self._compute(self._group_of[module], x))

    def add_to(self, module: str, residual: torch.Tensor) -> None:
        """Add `[1, T, out]` to the next output of `module`, inside its product; `module` has no siblings."""
        self._residuals[module] = residual

    def mlp(self, gate_module: str, down_module: str, gate: int, x: torch.Tensor) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `down(act(gate) * up)`, computed inside the products."""
        groups = self._group_of[gate_module], self._group_of[down_module]
        first, last = (self._products(group, x.device) for group in groups)
        weights, biases = zip(*(self._weights(group) for group in groups), strict=True)
        y: torch.Tensor = FusedMlp.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
            x.squeeze(0),
            anchor(first.is_trained or last.is_trained),
            self._residual(down_module),
            (first, last),
            gate,
            biases,
            *weights[0],
            *weights[1],
        )
        return y.unsqueeze(0)

    def experts(
        self, name: str, base: ExpertWeights, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Map `x` `[T, width]` to the weighted sums of each token's experts `index` `[T, k]` of a layer."""
        groups = [self._group_of[f"{name}.{product}"] for product in ("gate_proj", "down_proj")]
        tables, experts = self._products(groups[0], x.device).tables, groups[0].experts
        if experts not in self._probes:
            spans = [(each.start, each.stop) for each in self._all]
            self._probes[experts] = find_probes(spans, len(x), experts, x.device)
        rows = sort_rows(index, self._probes[experts])
        first, last = (ExpertProducts(group, tables, rows) for group in groups)
        is_trained = any(Products(group, tables).is_trained for group in groups)
        y: torch.Tensor = FusedExperts.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
            x, anchor(is_trained), weights, base, (first, last)
        )
        return y

    def parts(self, module: str) -> Sequence[Part]:
        """Return the segments whose adapter trains `module`."""
        return self._segments.parts(module)

    def _compute(self, group: ModuleGroup, x: torch.Tensor) -> dict[str, torch.Tensor]:
        products = self._products(group, x.device)
        weights, biases = self._weights(group)
        ys = FusedLinears.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
            x.squeeze(0), anchor(products.is_trained), self._residual(group.names[0]), products, biases, *weights
        )
        return {name: y.unsqueeze(0) for name, y in zip(group.names, ys, strict=True)}

    def _products(self, group: ModuleGroup, device: torch.device) -> Products:
        if self._tables is None:
            self._tables = make_tables(self._all, self._rows, self._groups, device)
        return Products(group, self._tables)

    def _weights(self, group: ModuleGroup) -> tuple[list[FrozenWeight], list[torch.Tensor]]:
        linears = [self._linears[name] for name in group.names]
        biases = [each.bias for each in linears if each.bias is not None]
        assert len(biases) in (0, len(linears))
        return [each.weight for each in linears], biases

    def _residual(self, module: str) -> torch.Tensor | None:
        residual = self._residuals.pop(module, None)
        return None if residual is None else residual.squeeze(0)


class Products(NamedTuple):
    """Launches of modules that read the same `x`, in one micro-batch."""

    group: ModuleGroup
    tables: Tables

    @property
    def is_trained(self) -> bool:
        """True if any adapter needs gradients of these modules."""
        return self.tables.columns(self.group) > 0 and len(self.tables.owners) > 1

    def low(self, xs: Sequence[torch.Tensor], side: int) -> torch.Tensor:
        """Return `[T, columns]`: `x A^T` of one `x`, or `gy B` of the gradients of all outputs."""
        tables, count = self.tables, len(self.group.names)
        columns = tables.columns(self.group)
        low: torch.Tensor = torch.ops.cotrain.lora_shrink(xs, count, side, tables.tiles, tables.of(self.group), columns)
        return low

    def outputs(
        self,
        x: torch.Tensor,
        weights: Sequence[FrozenWeight],
        biases: Sequence[torch.Tensor],
        low: torch.Tensor,
        residual: torch.Tensor | None = None,
        gate: int = 0,
    ) -> list[torch.Tensor]:
        """Return the output of each module, `[T, out]`; with a gate, their gated product follows."""
        ys: list[torch.Tensor] = torch.ops.cotrain.lora_expand(
            x, list(map(dense, weights)), biases, residual, gate, low, *self._of_tiles()
        )
        return ys

    def back(
        self,
        gys: Sequence[torch.Tensor],
        weights: Sequence[FrozenWeight],
        low_grad: torch.Tensor,
        gated: Sequence[torch.Tensor] = (),
        gate: int = 0,
    ) -> list[torch.Tensor]:
        """Return the gradient of the modules' input, or of the two `gated` factors of it."""
        gxs: list[torch.Tensor] = torch.ops.cotrain.lora_expand_back(
            gys, list(map(dense, weights)), gated, gate, low_grad, *self._of_tiles()
        )
        return gxs

    def add_gradients(
        self, x: torch.Tensor, low: torch.Tensor, gys: Sequence[torch.Tensor], low_grad: torch.Tensor
    ) -> None:
        """Add the gradients of the LoRA matrices to their arenas."""
        tables, count = self.tables, len(self.group.names)
        own = (tables.owners, tables.members, tables.spans, tables.of(self.group), tables.scales)
        torch.ops.cotrain.lora_add_gradient(low, gys, count, B, *own)
        torch.ops.cotrain.lora_add_gradient(low_grad, [x], count, A, *own)

    def _of_tiles(self) -> tuple[torch.Tensor, ...]:
        return self.tables.tiles, self.tables.of(self.group), self.tables.scales


class FusedLinears(torch.autograd.Function):
    """`y = x W^T + b + scale * (x A^T) B^T` of modules that read the same `x`, with the A and B of each row."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        residual: torch.Tensor | None,
        products: Products,
        biases: Sequence[torch.Tensor],
        *weights: FrozenWeight,
    ) -> tuple[torch.Tensor, ...]:
        """Return `[T, out]` of each module; `residual` is added if there is one module."""
        x = x.contiguous()
        low = products.low([x], A)
        keep_weights(ctx, weights, x, low)
        ctx.products, ctx.has_residual = products, residual is not None
        return tuple(products.outputs(x, weights, biases, low, residual))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`; add the gradients of the LoRA matrices to their arenas."""
        weights, (x, low) = kept_weights(ctx)
        products: Products = ctx.products
        gys = [grad.contiguous() for grad in grads]
        low_grad = products.low(gys, B)
        if ctx.needs_input_grad[1]:
            products.add_gradients(x, low, gys, low_grad)
        gx = products.back(gys, weights, low_grad)[0] if ctx.needs_input_grad[0] else None
        return gx, None, gys[0] if ctx.has_residual else None, *[None] * (2 + len(weights))


class FusedMlp(torch.autograd.Function):
    """`down(act(gate(x)) * up(x)) + residual`.

    The gated product is computed in the kernel of its factors, and so are the gradients of the factors.
    """

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        residual: torch.Tensor | None,
        products: tuple[Products, Products],
        gate: int,
        biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        *weights: FrozenWeight,
    ) -> torch.Tensor:
        """Return `[T, out]`; `weights` are the matrices of gate, up and down."""
        x, (first, last) = x.contiguous(), products
        low = first.low([x], A)
        *gated, inner = first.outputs(x, weights[:2], biases[0], low, gate=gate)
        inner_low = last.low([inner], A)
        keep_weights(ctx, weights, x, low, *gated, inner, inner_low)
        ctx.products, ctx.gate, ctx.has_residual = products, gate, residual is not None
        return last.outputs(inner, weights[2:], biases[1], inner_low, residual)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradients of `x` and of the residual; add those of the LoRA matrices to their arenas."""
        weights, (x, low, gate, up, inner, inner_low) = kept_weights(ctx)
        first, last = ctx.products
        gys = [grads[0].contiguous()]
        low_grad = last.low(gys, B)
        if ctx.needs_input_grad[1]:
            last.add_gradients(inner, inner_low, gys, low_grad)
        inner_gys = last.back(gys, weights[2:], low_grad, [gate, up], ctx.gate)
        low_grad = first.low(inner_gys, B)
        if ctx.needs_input_grad[1]:
            first.add_gradients(x, low, inner_gys, low_grad)
        gx = first.back(inner_gys, weights[:2], low_grad)[0] if ctx.needs_input_grad[0] else None
        return gx, None, gys[0] if ctx.has_residual else None, *[None] * (3 + len(weights))
