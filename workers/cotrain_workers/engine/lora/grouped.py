"""The backend `grouped`: a constant number of launches per module for any number of adapters.

A grouped product multiplies each group of rows with a matrix of its own. Segments are sorted by stack class,
so each class is one range of rows (`Groups`), and its segments begin at multiples of 8 rows. Filler rows
in between belong to the preceding segment, whose gradients they change by zero. Filler rows at the end form a group
with a matrix of zeros, because a grouped product leaves rows without a group uninitialised.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.nn import functional

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.quantized import FrozenWeight, dense, frozen_linear, keep_weight, kept_weight
from cotrain_workers.engine.lora.segmented import anchor
from cotrain_workers.engine.routing import Part, Segment, Source
from cotrain_workers.engine.spec import Layout, Pair, Target, aligned

T = TypeVar("T")
#: 16 bytes of a 16-bit type. Strides of a grouped product must be multiples of that.
MIN_RANK = 8
# Modules that read the same x: their A matrices are adjacent and form one product.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ROWS = 8  # alignment of the first row of every segment
# A grouped product supports 1,023 groups; one of them is for filler.
MAX_SEGMENTS = 1022
# Segments (by index) with gradients; within a round, no two add to the same matrices.
Round = Sequence[tuple[int, Mapping[str, Pair]]]


@dataclass(frozen=True)
class StackLayout:
    """Offsets of the padded matrices of one adapter in its slot."""

    rank: int  # padded
    siblings: Mapping[str, tuple[str, ...]]  # by module: modules that read the same x, in order, itself included
    a: Mapping[str, tuple[int, int]]  # by module: offset of A `[rank, in]`, and `in`
    b: Mapping[str, tuple[int, int]]  # by module: offset of B^T `[rank, out]`, and `out`
    size: int


class StackedWeights:
    """Copies of adapters in the layout of grouped products: one rank, one stride, no gaps.

    The adapters train the same modules, with ranks up to that of the layout. The copies are valid for one micro-batch.
    Filling them reads each arena once: 6 bytes per parameter under a 16-bit base, where the optimizer
    step moves 28. Nothing is retained for idle adapters, so no copy can be stale.

    One more slot of zeros follows, for rows without an adapter.
    """

    def __init__(self, layout: StackLayout, sources: Sequence[Source], dtype: torch.dtype) -> None:
        self.layout = layout
        device = sources[0].weights.device
        self._flat = torch.zeros(len(sources) + 1, layout.size, dtype=dtype, device=device)
        for slot, source in zip(self._flat, sources, strict=False):
            # The copy also casts, so there is no intermediate copy of an adapter.
            torch._foreach_copy_(
                views_at(slot, matrix_spans(layout, source.layout.rank)),
                views_at(source.weights, arena_spans(source.layout)),
            )

    def a(self, siblings: tuple[str, ...]) -> torch.Tensor:
        """Return the A matrices of modules that read the same x, `[slots, modules * rank, in]`."""
        at, width = self.layout.a[siblings[0]]
        return self._stack(at, len(siblings) * self.layout.rank, width)

    def b(self, module: str) -> torch.Tensor:
        """Return B^T of a module, `[slots, rank, out]`."""
        at, width = self.layout.b[module]
        return self._stack(at, self.layout.rank, width)

    def pair(self, module: str, slot: int, rank: int) -> Pair:
        """Return the matrices of one adapter, with its own rank."""
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
    """Return the key of adapters that fit into one stack: padded rank and families."""
    return padded_rank(layout.rank), tuple(sorted({target.family for target in layout.targets}))


def padded_rank(rank: int) -> int:
    """Return the rank padded to a power of two, at least 8, which limits the number of classes."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


@cache
def plan_stack(rank: int, targets: tuple[Target, ...]) -> StackLayout:
    """Return the layout of a slot for adapters of padded `rank` on these modules."""
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
    """Return a key that is equal for modules that read the same x."""
    parent, _, name = target.name.rpartition(".")
    return parent, next((names[0] for names in SIBLINGS if name in names), name)


def arena_spans(layout: Layout) -> list[tuple[int, int]]:
    """Return offset and size of each matrix in an arena: A and B, module by module."""
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
    """Return the parts of a 1-D tensor at non-overlapping `spans`, in their order.

    One split replaces a slice per span, because 500 slices take a millisecond.
    """
    sizes, end = [], 0
    in_order = sorted(range(len(spans)), key=lambda at: spans[at][0])
    for start, size in (spans[at] for at in in_order):
        sizes += [start - end, size]
        end = start + size
    chunks = flat.split_with_sizes([*sizes, len(flat) - end])[1::2]
    view_by_span = dict(zip(in_order, chunks, strict=True))
    return [view_by_span[at] for at in range(len(spans))]


@dataclass(frozen=True)
class Groups:
    """Adjacent segments of one stack class: rows `start` to `stop` of the packed row."""

    start: int
    stop: int
    stacked: StackedWeights
    segments: Sequence[Segment]
    slots: Sequence[int]  # index of each segment's adapter in the stack
    rounds: Sequence[Round]
    adapter_ends: torch.Tensor  # int32 [adapters + 1]: end of each adapter's rows, then of the filler
    segment_ends: torch.Tensor  # int32 [segments]: end of each segment's rows
    scales: torch.Tensor  # fp32 [stop - start, 1]

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows `[n, …]` of `rows` `[T, …]`."""
        return rows[self.start : self.stop]


def find_groups(segments: Sequence[Segment], rows: int, dtype: torch.dtype) -> Iterator[Groups]:
    """Yield groups of adjacent segments of one stack class, in a packed row of `rows`.

    Segments of the base model without an adapter are left out.
    """
    cuts = list(neighbours(segments))
    starts = [own[0].start for own in cuts]
    for own, start, stop in zip(cuts, starts, [*starts, rows][1:], strict=True):
        if own[0].source.layout.targets:
            yield make_groups(own, start, stop, dtype)


def neighbours(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Yield lists of adjacent segments of one class, at most MAX_SEGMENTS each."""
    for _, same in groupby(segments, key=lambda segment: stack_class(segment.source.layout)):
        own = list(same)
        for at in range(0, len(own), MAX_SEGMENTS):
            yield own[at : at + MAX_SEGMENTS]


def make_groups(own: Sequence[Segment], start: int, stop: int, dtype: torch.dtype) -> Groups:
    """Return the groups of some segments; each segment's rows extend to the start of the next one."""
    last = start + -(-(own[-1].stop - start) // ROWS) * ROWS
    ends = [segment.start - start for segment in own[1:]] + [last - start]
    sources: list[Source] = []
    slots: list[int] = []
    adapter_ends: list[int] = []
    for segment, end in zip(own, ends, strict=True):
        if sources and sources[-1] is segment.source:
            adapter_ends[-1] = end
        else:
            sources.append(segment.source)
            adapter_ends.append(end)
        slots.append(len(sources) - 1)
    layout = own[0].source.layout
    device = sources[0].weights.device
    counts = [end - before for end, before in zip(ends, [0, *ends], strict=False)]
    scales = np.repeat([segment.scale for segment in own], counts)
    filler = np.zeros(stop - start - ends[-1])
    return Groups(
        start=start,
        stop=stop,
        stacked=StackedWeights(plan_stack(padded_rank(layout.rank), layout.targets), sources, dtype),
        segments=own,
        slots=slots,
        rounds=find_rounds(own),
        adapter_ends=to_device(np.array([*adapter_ends, stop - start], np.int32), device),
        segment_ends=to_device(np.array(ends, np.int32), device),
        scales=to_device(np.concatenate([scales, filler]).astype(np.float32)[:, None], device),
    )


def find_rounds(segments: Sequence[Segment]) -> Sequence[Round]:
    """Return rounds of gradient additions: one launch adds to many gradients, but to none of them twice."""
    rounds: list[list[tuple[int, Mapping[str, Pair]]]] = []
    round_by_gradient: dict[int, int] = {}
    for at, segment in enumerate(segments):
        if segment.grads is None:
            continue
        number = round_by_gradient.get(id(segment.grads), 0)
        round_by_gradient[id(segment.grads)] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append((at, segment.grads))
    return rounds


class SiblingResults(Generic[T]):
    """Results for modules that read the same tensor `x`: the first one computes those of all, each takes its own."""

    def __init__(self) -> None:
        self._x: torch.Tensor | None = None
        self._left: dict[str, T] = {}

    def take(self, module: str, x: torch.Tensor, compute: Callable[[], dict[str, T]]) -> T:
        """Return the result of `module`; `compute` returns those of all modules that read `x`."""
        if self._x is not x or module not in self._left:
            self._x, self._left = x, compute()
        found = self._left.pop(module)
        if not self._left:
            self._x = None
        return found


class GroupedLora:
    """LoRA paths of one micro-batch. The order of the segments determines the number of groups."""

    def __init__(self, segments: Sequence[Segment], rows: int, dtype: torch.dtype) -> None:
        self._groups = list(find_groups(segments, rows, dtype))
        self._groups_by_module: dict[str, list[Groups]] = {}
        self._lows = SiblingResults[tuple[torch.Tensor, ...]]()

    def linear(self, module: str, x: torch.Tensor, weight: FrozenWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`."""
        groups = self._groups_of(module)
        if not groups:
            return frozen_linear(x, weight, bias)
        lows = self._lows.take(module, x, lambda: shared_lows(module, x, groups))
        out: torch.Tensor = GroupedLinear.apply(x, weight, bias, module, groups, *lows)  # type: ignore[no-untyped-call]  # torch gives it none
        return out

    def parts(self, module: str) -> Sequence[Part]:
        """Return the segments whose adapter trains `module`, as views into the stacks."""
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
            self._groups_by_module[module] = [g for g in self._groups if module in g.stacked.layout.b]
        return self._groups_by_module[module]


def shared_lows(module: str, x: torch.Tensor, groups: Sequence[Groups]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return `scale * x A^T` for each group, of `module` and its siblings."""
    siblings, size = groups[0].stacked.layout.siblings[module], len(groups)
    needs_grad = any(each.rounds for each in groups)
    lows = SharedLow.apply(x, anchor(needs_grad), siblings, groups)  # type: ignore[no-untyped-call]  # torch gives it none
    return {name: lows[at * size : (at + 1) * size] for at, name in enumerate(siblings)}


class SharedLow(torch.autograd.Function):
    """`scale * x [A_1; A_2; …]^T` for modules that read the same `x`, as one product per stack class."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, siblings: tuple[str, ...], groups: Sequence[Groups]
    ) -> tuple[torch.Tensor, ...]:
        """Return `[n, rank]` per module and class, module by module."""
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
        """Return the gradient of `x`; add the gradients of the A matrices to their arenas."""
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
    """`y = x W^T + b`, and `y += low B^T` on the rows of each stack class."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any,
        x: torch.Tensor,
        weight: FrozenWeight,
        bias: torch.Tensor | None,
        module: str,
        groups: Sequence[Groups],
        *lows: torch.Tensor,
    ) -> torch.Tensor:
        """Return `y` `[1, T, out]`."""
        keep_weight(ctx, weight, *lows)
        ctx.module, ctx.groups = module, groups
        y = functional.linear(x, dense(weight), bias)
        for each, low in zip(groups, lows, strict=True):
            stack = each.stacked.b(module)
            each.take(y[0]).add_(functional.grouped_mm(low, stack, offs=each.adapter_ends))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradients of `x` and of each `low`; add the gradients of the B matrices to their arenas."""
        weight, lows = kept_weight(ctx)
        gy = grads[0][0].contiguous()  # grouped products reject expanded tensors
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
    # [segments, out, rank], transposed in memory like B in an arena
    products = weight_gradient(groups, low, gy).transpose(1, 2).unbind()
    for each in groups.rounds:
        totals = [grads[module].b for _, grads in each]
        added = [products[at][:, : total.shape[1]] for (at, _), total in zip(each, totals, strict=True)]
        torch._foreach_add_(totals, added)


def weight_gradient(groups: Groups, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left^T right` over the rows of each segment, fp32 `[segments, columns, columns]`.

    A product of a 16-bit type is rounded to it once; the accumulation is in fp32.
    """
    return functional.grouped_mm(left.t(), right, offs=groups.segment_ends).float()


def joined(products: Sequence[torch.Tensor], groups: Sequence[Groups], like: torch.Tensor) -> torch.Tensor:
    """Return the rows of each group in one tensor of the shape of `like` `[1, T, …]`, zero elsewhere."""
    if len(products[0]) == like.shape[1]:
        return products[0][None]
    whole = torch.zeros_like(like)
    for each, product in zip(groups, products, strict=True):
        each.take(whole[0]).copy_(product)
    return whole
