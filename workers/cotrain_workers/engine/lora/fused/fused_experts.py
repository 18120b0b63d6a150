"""Experts of a layer with fused LoRA: about twenty launches forward and backward, for any number of adapters.

Everything that depends on the choice of the router is computed on the device: the order of the rows, the rows of
each adapter in each expert, and the tiles. The host only has upper bounds, so it never waits for a router.

Matrices that the experts share are multiplied by token, before the tokens are copied to their experts or after their
sums. Matrices of single experts are multiplied by row. Adapters of both forms may be in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.lora.fused import expert_operators
from cotrain_workers.engine.lora.fused.tables import ROWS, A, B, ModuleGroup, Tables
from cotrain_workers.engine.routing import ExpertWeights

OPS = torch.ops.cotrain


class Rows(NamedTuple):
    """Rows of the experts of a layer."""

    tokens: torch.Tensor  # int64 [P]: token of each row
    pairs: torch.Tensor  # int64 [P]: pair of a token and its nth expert, of each row
    positions: torch.Tensor  # int64 [P]: row of each pair
    bounds: torch.Tensor
    tiles: torch.Tensor
    experts: torch.Tensor  # int64 [T, k]: experts of each token

    @property
    def chosen(self) -> int:
        """Number of experts of a token."""
        return self.experts.shape[1]


def find_probes(spans: Sequence[tuple[int, int]], rows: int, experts: int, device: torch.device) -> torch.Tensor:
    """Return the keys `[experts + 1, 1 + 2 * segments]` whose positions in the sorted keys are the bounds.

    The key of a pair is `expert * rows + token`. `spans` are the first token and the end of each segment.
    """
    within = np.array([0, *(edge for span in spans for edge in span)], np.int32)
    firsts = np.arange(experts + 1, dtype=np.int32) * rows
    return to_device(firsts[:, None] + within, device)


def sort_rows(index: torch.Tensor, probes: torch.Tensor) -> Rows:
    """Return the rows of tokens whose experts are `index` `[T, k]`, without a read by the host."""
    tokens, chosen = index.shape
    count = torch.arange(index.numel(), device=index.device)
    keys = (index.int() * tokens).add_(count[:tokens, None])
    keys, pairs = keys.flatten().sort(stable=True)
    bounds = torch.searchsorted(keys, probes, out_int32=True)
    tiles = OPS.expert_tiles(bounds, expert_operators.most_tiles(len(keys), len(bounds) - 1), ROWS)
    with unordered_writes():
        positions = torch.empty_like(pairs).scatter_(0, pairs, count)
    return Rows(pairs // chosen, pairs, positions, bounds, tiles, index)


class ExpertProducts(NamedTuple):
    """Launches of one or two products of the experts of a layer, in one micro-batch."""

    group: ModuleGroup
    tables: Tables
    rows: Rows

    @property
    def of_rows(self) -> tuple[torch.Tensor, ...]:
        """Tables of the products with weights."""
        entries = self.tables.of(self.group)
        return self.rows.tiles, self.rows.bounds, entries, self.tables.scales

    def inner_low(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the LoRA columns of rows `[P, columns]` on the side of the single experts."""
        return self._own_low(xs, A + B - self.group.outer)

    def outer_low(self, x: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
        """Return the LoRA columns of rows `[P, columns]` on the shared side.

        `x` are values of tokens, and `of_rows` the same by row.
        """
        group, tables = self.group.of_tokens, self.tables
        low: torch.Tensor | None = None
        if tables.columns(group):
            names, columns = len(group.names), tables.columns(self.group)
            of_tokens = tables.tiles, tables.of(group), columns
            low = OPS.lora_shrink([x], names, group.outer, *of_tokens)[self.rows.tokens]
        if low is None or tables.has_own(self.group):
            return self._own_low([of_rows], group.outer, low)
        return low

    def add_gradients(self, low: torch.Tensor, xs: Sequence[torch.Tensor], shares: torch.Tensor | None = None) -> None:
        """Add the gradients of the single experts' matrices, whose products with rows are `low`."""
        self._add_own(low, xs, A + B - self.group.outer, shares)

    def add_outer_gradients(self, low: torch.Tensor, x: torch.Tensor, shares: torch.Tensor | None = None) -> None:
        """Add the gradients on the shared side, of rows `low` and tokens `x`."""
        group, tables, rows = self.group.of_tokens, self.tables, self.rows
        if tables.columns(group):
            summed = OPS.expert_sum(low, shares, rows.positions, rows.chosen)
            entries = tables.of(group)
            OPS.lora_add_gradient(
                summed, [x], len(group.names), group.outer, tables.owners, tables.members,
                tables.spans, entries, tables.scales,
            )  # fmt: skip
        if tables.has_own(self.group):
            self._add_own(low, [x.index_select(0, rows.tokens)], group.outer, shares)

    def _own_low(self, xs: Sequence[torch.Tensor], side: int, low: torch.Tensor | None = None) -> torch.Tensor:
        if low is None:
            low = xs[0].new_empty(len(xs[0]), self.tables.columns(self.group))
        names, entries = len(self.group.names), self.tables.of(self.group)
        if low.shape[1]:
            OPS.expert_shrink(xs, names, side, self.rows.bounds, entries, low)
        return low

    def _add_own(self, low: torch.Tensor, xs: Sequence[torch.Tensor], side: int, shares: torch.Tensor | None) -> None:
        tables, names = self.tables, len(self.group.names)
        OPS.expert_gradient(
            low, xs, names, side, shares, tables.owners, tables.members, self.rows.bounds,
            tables.of(self.group), tables.scales,
        )  # fmt: skip


class FusedExperts(torch.autograd.Function):
    """Sum over a token's experts of `share * down(gated(gate(x), up(x)))`, with the adapter of the token."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weights: torch.Tensor,
        base: ExpertWeights,
        products: tuple[ExpertProducts, ExpertProducts],
    ) -> torch.Tensor:
        """Return `[T, width]` of `x` `[T, width]`; `weights` `[T, k]` are the shares of a token's experts."""
        x, (first, last) = x.contiguous(), products
        rows = first.rows
        shares = weights.flatten().index_select(0, rows.pairs).float()
        of_rows = x.index_select(0, rows.tokens)
        low = first.outer_low(x, of_rows)
        gate, up, inner = OPS.expert_expand(
            of_rows, base.gate_and_up, base.gate_biases, base.gate, low, shares, *first.of_rows
        )
        inner_low = last.inner_low([inner])
        (y,) = OPS.expert_expand(inner, [base.down], base.down_biases, 0, inner_low, shares, *last.of_rows)
        ctx.save_for_backward(x, weights, shares, low, gate, up, inner, inner_low)
        ctx.base, ctx.products = base, products
        out: torch.Tensor = OPS.expert_sum(y, None, rows.positions, rows.chosen)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradients of `x` and the shares; add those of the LoRA matrices to their arenas."""
        x, weights, shares, low, gate, up, inner, inner_low = ctx.saved_tensors
        base, (first, last) = ctx.base, ctx.products
        rows, g, is_trained = first.rows, grads[0].contiguous(), ctx.needs_input_grad[1]
        of_rows = g.index_select(0, rows.tokens)
        low_grad = last.outer_low(g, of_rows)
        *gys, slopes = OPS.expert_expand_back(
            [of_rows], [base.down], [gate, up], base.gate, low_grad, shares, *last.of_rows
        )
        if is_trained:
            last.add_gradients(low_grad, [inner], shares)
            last.add_outer_gradients(inner_low, g, shares)
        low_grad = first.inner_low(gys)
        if is_trained:
            first.add_gradients(low, gys)
            first.add_outer_gradients(low_grad, x)
        gx = None
        if ctx.needs_input_grad[0]:
            (gx,) = OPS.expert_expand_back(gys, base.gate_and_up, [], 0, low_grad, shares, *first.of_rows)
            gx = OPS.expert_sum(gx, None, rows.positions, rows.chosen)
        of_shares = slopes.sum(dim=1).index_select(0, rows.positions).view_as(weights)
        for bias in base.down_biases:
            of_shares = of_shares + (g @ bias.t()).gather(1, rows.experts)
        return gx, None, of_shares.to(weights.dtype), None, None
