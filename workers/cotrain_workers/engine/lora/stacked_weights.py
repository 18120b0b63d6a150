"""Copies of many adapters side by side, as grouped products want them: one rank, one stride, no gaps.

They live for one micro-batch. Filling it reads each arena once (6 bytes a parameter under a 16-bit base,
where the optimizer step moves 28), so nothing is kept for idle adapters, and no copy can be stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.spec import Pair, aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_workers.engine.routing import Source
    from cotrain_workers.engine.spec import Layout, Target

MIN_RANK = 8  # 16 bytes of a 16-bit type: the strides of a grouped product are multiples of that
# Modules that read one x: their A matrices lie next to each other, and are one product.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class StackLayout:
    """Where the padded matrices of one adapter lie in its slot."""

    rank: int  # padded
    siblings: Mapping[
        str, tuple[str, ...]
    ]  # by module: who reads the same x, in order, itself included
    a: Mapping[str, tuple[int, int]]  # by module: offset of A `[rank, in]`, and `in`
    b: Mapping[str, tuple[int, int]]  # by module: offset of B^T `[rank, out]`, and `out`
    size: int


class StackedWeights:
    """The weights of some adapters that train the same modules, in ranks up to that of the layout.

    Behind them lies one more slot, of zeros, for rows of no adapter.
    """

    def __init__(self, layout: StackLayout, sources: Sequence[Source], dtype: torch.dtype) -> None:
        self.layout = layout
        device = sources[0].weights.device
        self._flat = torch.zeros(len(sources) + 1, layout.size, dtype=dtype, device=device)
        for slot, source in zip(self._flat, sources, strict=False):
            # It casts as it copies: no second copy of an adapter is made on the way.
            torch._foreach_copy_(
                views_at(slot, matrix_spans(layout, source.layout.rank)),
                views_at(source.weights, arena_spans(source.layout)),
            )

    def a(self, siblings: tuple[str, ...]) -> torch.Tensor:
        """Return the A matrices of modules that read one x, `[slots, modules * rank, in]`."""
        at, width = self.layout.a[siblings[0]]
        return self._stack(at, len(siblings) * self.layout.rank, width)

    def b(self, module: str) -> torch.Tensor:
        """Return B^T of a module, `[slots, rank, out]`."""
        at, width = self.layout.b[module]
        return self._stack(at, self.layout.rank, width)

    def pair(self, module: str, slot: int, rank: int) -> Pair:
        """Return the matrices of one adapter, of its own rank."""
        at_a, inputs = self.layout.a[module]
        at_b, outputs = self.layout.b[module]
        flat = self._flat[slot]
        return Pair(
            flat[at_a : at_a + rank * inputs].view(rank, inputs),
            flat[at_b : at_b + rank * outputs].view(rank, outputs).t(),
        )

    def _stack(self, at: int, rows: int, width: int) -> torch.Tensor:
        return self._flat[:, at : at + rows * width].view(-1, rows, width)


def stack_class(layout: Layout) -> tuple[int, tuple[str, ...]]:
    """Name what adapters have in common that fit into one stack: padded rank and families."""
    return padded_rank(layout.rank), tuple(sorted({target.family for target in layout.targets}))


def padded_rank(rank: int) -> int:
    """Return the rank a stack pads to: a power of two, 8 at least, so that there are few classes."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


@cache
def plan_stack(rank: int, targets: tuple[Target, ...]) -> StackLayout:
    """Lay out a slot for adapters of padded `rank` on these modules."""
    siblings, a, b, end = {}, {}, {}, 0
    for _, same in groupby(targets, key=shared_input):
        together = list(same)
        for target in together:
            siblings[target.name] = tuple(each.name for each in together)
            a[target.name] = (end, target.inputs)
            end += rank * target.inputs
        end = aligned(end)
        for target in together:
            b[target.name] = (end, target.outputs)
            end = aligned(end + rank * target.outputs)
    return StackLayout(rank, siblings, a, b, end)


def shared_input(target: Target) -> tuple[str, str]:
    """Name what a module reads, the same for those that read one x."""
    parent, _, name = target.name.rpartition(".")
    return parent, next((names[0] for names in SIBLINGS if name in names), name)


def arena_spans(layout: Layout) -> list[tuple[int, int]]:
    """Return offset and size of each matrix in an arena: A and B of one module after the other."""
    spans = []
    for target in layout.targets:
        at_a, at_b = layout.offset_by_name[target.name]
        spans.append((at_a, layout.rank * target.inputs))
        spans.append((at_b, layout.rank * target.outputs))
    return spans


def matrix_spans(layout: StackLayout, rank: int) -> list[tuple[int, int]]:
    """Return offset and size of each matrix of an adapter of `rank` in a slot, in the same order."""
    spans = []
    for (at_a, inputs), (at_b, outputs) in zip(layout.a.values(), layout.b.values(), strict=True):
        spans.append((at_a, rank * inputs))
        spans.append((at_b, rank * outputs))
    return spans


def views_at(flat: torch.Tensor, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the parts of a 1-D tensor at `spans`, which do not overlap, in their order.

    One split instead of a slice for each: 500 slices take a millisecond.
    """
    sizes, end = [], 0
    in_order = sorted(range(len(spans)), key=lambda at: spans[at][0])
    for start, size in (spans[at] for at in in_order):
        sizes += [start - end, size]
        end = start + size
    chunks = flat.split_with_sizes([*sizes, len(flat) - end])[1::2]
    view_by_span = dict(zip(in_order, chunks, strict=True))
    return [view_by_span[at] for at in range(len(spans))]
