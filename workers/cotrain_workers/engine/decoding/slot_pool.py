"""Memory pool of sampler weights of one rank class, and the layout of matrices in a slot.

Adapters of one rank class (rank rounded up to a power of two, at least 8) share one pool. Rows of many adapters then
gather their matrices in one call. Ranks and outputs are padded with zeros, because aligned products have the same bits
in every batch. Aligned means that an item starts on a cache line and has a multiple of its length. This was measured on
CPU fp32 for widths 33 to 4096 and ranks 8 to 128; without padding, it fails for odd widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.siblings import shared_input
from cotrain_workers.engine.spec import AdapterSpec, Target, aligned, matrices, own_matrices, plan_layout

ZERO_SLOTS = 2  # per pool
#: 16 bytes of a 16-bit type. Strides of a grouped product must be multiples of that.
MIN_RANK = 8


@dataclass(frozen=True)
class SlotLayout:
    """Offsets of the padded matrices of each module in a slot."""

    rank: int  # padded
    offset_by_name: Mapping[str, tuple[int, int]]  # of A `[rank, in]` and B `[rank, padded out]`
    target_by_name: Mapping[str, Target]
    siblings: Mapping[str, tuple[str, ...]]  # modules that read the same x and whose A matrices are adjacent, by module
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

    @property
    def memory_key(self) -> tuple[tuple[int, bool], int, int]:
        """Memory that a CUDA graph reads: kind, address, number of slots."""
        return self.layout.kind, self.flat.data_ptr(), len(self.flat)

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
            matrices(self.flat[slot], at_b, 1, target.experts_b, layout.rank, aligned(target.outputs)),
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

    def _shaped(self, module: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def slot_per_row(slots: Sequence[Slot | None], pool: Pool, left: int) -> list[int]:
    """Return the slot of a pool for each row, followed by `left` filler rows, in ascending order.

    Rows of other pools use a slot of zeros: the first one before the rows of this pool, else the last.
    """
    before, last, found = True, len(pool.flat) - 1, []
    for slot in slots:
        is_own = slot is not None and slot.pool is pool
        before = before and not is_own
        found.append(slot.index if slot is not None and is_own else 0 if before else last)
    return found + [last] * left


def padded_rank(rank: int) -> int:
    """Return the rank padded to a power of two, at least 8, which limits the number of pools."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


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
    return SlotLayout(padded, offsets, {each.name: each for each in targets}, siblings, end, per_expert)


def neighbours(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Yield modules that read the same x, grouped if their A matrices can be adjacent without a gap."""
    for _, same in groupby(targets, key=shared_input):
        together = list(same)
        if not together[0].experts and aligned(MIN_RANK * together[0].inputs) == MIN_RANK * together[0].inputs:
            yield together
        else:
            yield from ([target] for target in together)


@dataclass(frozen=True)
class _Block:
    """Position of one module's A or B^T matrices in an arena, and in a slot with padded ranks and widths."""

    shape: tuple[int, ...]
    arena_strides: tuple[int, ...]
    arena_at: int
    slot_strides: tuple[int, ...]
    slot_at: int


@dataclass(frozen=True)
class Filling:
    """Positions of the matrices of all adapters of one shape in their arenas and in slots, computed once."""

    layout: SlotLayout
    arena_size: int
    modules: frozenset[str]  # modules that the adapters change
    a_blocks: tuple[_Block, ...]
    b_blocks: tuple[_Block, ...]

    def write(self, weights: torch.Tensor, scale: float, slot: torch.Tensor) -> None:
        """Write an arena `[arena_size]` to a slot `[layout.size]` of the same device, with B times `scale`."""
        of_a = [_in_arena(weights, block) for block in self.a_blocks]
        of_b = torch._foreach_mul([_in_arena(weights, block) for block in self.b_blocks], scale)
        slot.zero_()
        to = [_in_slot(slot, block) for block in (*self.a_blocks, *self.b_blocks)]
        torch._foreach_copy_(to, [*of_a, *of_b])


def filling_of(spec: AdapterSpec, targets: Sequence[Target], layout: SlotLayout) -> Filling:
    """Return the positions for adapters of the shape of `spec` in slots of `layout`."""
    own = plan_layout(spec, targets)
    a_blocks, b_blocks = [], []
    for target in own.targets:
        (arena_a, arena_b), (slot_a, slot_b) = (each.offset_by_name[target.name] for each in (own, layout))
        inputs, outputs = target.inputs, target.outputs
        size_a, size_b = ((target.experts_a, spec.rank, inputs), (target.experts_b, spec.rank, outputs))
        a_blocks.append(_block(size_a, arena_a, layout.rank, inputs, slot_a))
        b_blocks.append(_block(size_b, arena_b, layout.rank, aligned(outputs), slot_b))
    names = frozenset(target.name for target in own.targets)
    return Filling(layout, own.size, names, tuple(a_blocks), tuple(b_blocks))


def _block(size: tuple[int, int, int], arena_at: int, slot_rank: int, slot_width: int, slot_at: int) -> _Block:
    """Return the block of `size` (count, rank, width). One without a gap is a single row."""
    count, rank, width = size
    if width == slot_width and (count == 1 or rank == slot_rank):
        return _Block((count * rank * width,), (1,), arena_at, (1,), slot_at)
    arena_strides = (rank * width, width, 1)
    slot_strides = (slot_rank * slot_width, slot_width, 1)
    return _Block(size, arena_strides, arena_at, slot_strides, slot_at)


def _in_arena(arena: torch.Tensor, block: _Block) -> torch.Tensor:
    return arena.as_strided(block.shape, block.arena_strides, arena.storage_offset() + block.arena_at)


def _in_slot(slot: torch.Tensor, block: _Block) -> torch.Tensor:
    return slot.as_strided(block.shape, block.slot_strides, slot.storage_offset() + block.slot_at)
