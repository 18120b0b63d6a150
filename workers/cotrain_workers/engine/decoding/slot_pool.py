"""Memory pool of sampler weights of one rank class, and the layout of matrices in a slot.

Adapters of one rank class (rank rounded up to a power of two, at least 8) share one pool. Rows of many
adapters then gather their matrices in one call. Ranks and outputs are padded with zeros, because aligned
products have the same bits in every batch. Aligned means that an item starts on a cache line and has a multiple of
its length. This was measured on CPU fp32 for widths 33 to 4096 and ranks 8 to 128; without padding, it fails for
odd widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.grouped import MIN_RANK, padded_rank, shared_input
from cotrain_workers.engine.spec import (
    AdapterSpec,
    Target,
    aligned,
    matrices,
    own_matrices,
    plan_layout,
)

ZERO_SLOTS = 2  # per pool


@dataclass(frozen=True)
class SlotLayout:
    """Offsets of the padded matrices of each module in a slot."""

    rank: int  # padded
    offset_by_name: Mapping[str, tuple[int, int]]  # of A `[rank, in]` and B `[rank, padded out]`
    target_by_name: Mapping[str, Target]
    siblings: Mapping[str, tuple[str, ...]]
    """Modules that read the same x and whose A matrices are adjacent, by module."""
    size: int
    per_expert: bool = False

    @property
    def kind(self) -> tuple[int, bool]:
        """Rank class of a pool: adapters of one kind have equal layouts."""
        return self.rank, self.per_expert


@dataclass(eq=False)
class Pool:
    """Slots of one rank class."""

    layout: SlotLayout
    flat: torch.Tensor  # [slots, layout.size]
    free: list[int] = field(default_factory=list)

    @property
    def slot_bytes(self) -> int:
        """Size of one slot in bytes."""
        return self.layout.size * self.flat.element_size()

    @property
    def bytes(self) -> int:
        """Size of all slots in bytes."""
        return self.flat.shape[0] * self.slot_bytes

    def matrices(self, module: str, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of A `[n, rank, in]` and scale * B^T `[n, rank, padded out]` of `slots`, int64 `[n]`."""
        a, b = (part.index_select(0, slots) for part in self._parts(module))
        return self._shaped(module, a, b)

    def repeated(self, module: str, slot: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and scale * B^T of one slot, repeated `n` times without a copy."""
        a, b = (part[slot : slot + 1].expand(n, -1) for part in self._parts(module))
        return self._shaped(module, a, b)

    def stacked_a(self, siblings: tuple[str, ...]) -> torch.Tensor:
        """Return A of sibling modules for all slots, without a copy: `[slots, siblings * rank, in]`."""
        at, _ = self.layout.offset_by_name[siblings[0]]
        width = self.layout.target_by_name[siblings[0]].inputs
        rows = len(siblings) * self.layout.rank
        return self.flat[:, at : at + rows * width].view(-1, rows, width)

    def stacked_b(self, module: str) -> torch.Tensor:
        """Return scale * B^T for all slots, without a copy: `[slots, rank, padded out]`."""
        return self._shaped(module, *self._parts(module))[1]

    def of_experts(self, module: str, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A `[1 or experts, rank, in]` and scale * B^T `[1 or experts, rank, padded out]` of one slot."""
        layout, target = self.layout, self.layout.target_by_name[module]
        at_a, at_b = layout.offset_by_name[module]
        return (
            matrices(self.flat[slot], at_a, 1, target.experts_a, layout.rank, target.inputs),
            matrices(
                self.flat[slot], at_b, 1, target.experts_b, layout.rank, aligned(target.outputs)
            ),
        )

    def grow(self, slots: int) -> None:
        """Add free slots. The first and the last slot stay zero, for rows of other pools."""
        count = max(len(self.flat), ZERO_SLOTS)
        grown = self.flat.new_zeros(count + slots, self.layout.size)
        grown[: len(self.flat)] = self.flat
        self.flat = grown
        self.free += range(count + slots - 2, count - 2, -1)

    def shrink(self, filled: Sequence[Slot]) -> None:
        """Reduce the memory to the filled slots; each may move."""
        kept = [0, *(slot.index for slot in filled), len(self.flat) - 1]
        self.flat = self.flat.index_select(0, to_device(torch.tensor(kept), self.flat.device))
        self.free = []
        for index, slot in enumerate(filled, 1):
            slot.index = index

    def _parts(self, module: str) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self.layout
        at_a, at_b = layout.offset_by_name[module]
        target = layout.target_by_name[module]
        size_a = aligned(layout.rank * target.inputs)
        size_b = layout.rank * aligned(target.outputs)
        return self.flat[:, at_a : at_a + size_a], self.flat[:, at_b : at_b + size_b]

    def _shaped(
        self, module: str, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rank, target = self.layout.rank, self.layout.target_by_name[module]
        shape = (-1, rank, target.inputs)
        return a[:, : rank * target.inputs].view(shape), b.view(-1, rank, aligned(target.outputs))


@dataclass(eq=False)
class Slot:
    """Slot with sampler weights on the device."""

    pool: Pool
    index: int
    modules: frozenset[str]  # modules that the weights change; the matrices of others are zero
    users: int = 0
    unpinned_at: float = -math.inf


def slot_layout(targets: Sequence[Target], rank: int, *, per_expert: bool = False) -> SlotLayout:
    """Return the layout of the padded matrices of every module for adapters of a rank."""
    padded = padded_rank(rank)
    if per_expert:
        targets = own_matrices(targets)
    offsets: dict[str, tuple[int, int]] = {}
    siblings: dict[str, tuple[str, ...]] = {}
    end = 0
    for together in neighbours(targets):
        size_a = aligned(together[0].experts_a * padded * together[0].inputs)
        at_b = end + len(together) * size_a
        for at, target in enumerate(together):
            offsets[target.name] = (end + at * size_a, at_b)
            at_b += target.experts_b * padded * aligned(target.outputs)
            siblings[target.name] = tuple(each.name for each in together)
        end = at_b
    return SlotLayout(
        padded, offsets, {each.name: each for each in targets}, siblings, end, per_expert
    )


def neighbours(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Yield modules that read the same x, grouped if their A matrices can be adjacent without a gap."""
    for _, same in groupby(targets, key=shared_input):
        together = list(same)
        if (
            not together[0].experts
            and aligned(MIN_RANK * together[0].inputs) == MIN_RANK * together[0].inputs
        ):
            yield together
        else:
            yield from ([target] for target in together)


def lay_out(
    weights: torch.Tensor, spec: AdapterSpec, layout: SlotLayout, slot: torch.Tensor
) -> None:
    """Write an adapter's arena `[size]` to a slot `[layout.size]` of the same device."""
    rank = spec.rank
    own = plan_layout(spec, list(layout.target_by_name.values()))
    scaled = own.views(weights * spec.scale)
    to, found = [], []
    for name, pair in own.views(weights).items():
        at_a, at_b = layout.offset_by_name[name]
        target = layout.target_by_name[name]
        width = aligned(target.outputs)
        of_a = matrices(slot, at_a, 1, target.experts_a, layout.rank, target.inputs)
        of_b = matrices(slot, at_b, 1, target.experts_b, layout.rank, width)
        to += [of_a[:, :rank], of_b[:, :rank, : target.outputs]]
        found += [pair.a.view_as(to[-2]), scaled[name].bt.view_as(to[-1])]
    slot.zero_()
    torch._foreach_copy_(to, found)
