"""Sampler weights on the device: a cache of slots, filled from adapters that are there, or from the host.

Adapters of one rank class (rank rounded up to a power of two, 8 at least) lie in one pool, so that rows
of many adapters gather their matrices in one call. Ranks and outputs are padded with zeros: a product
whose items start on a cache line and are multiples of it long has the same bits in every batch (measured
on CPU fp32 for widths 33 to 4096 and ranks 8 to 128; without the padding, not for odd widths).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.stacked_weights import MIN_RANK, padded_rank, shared_input
from cotrain_workers.engine.spec import aligned, plan_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cotrain_workers.engine.ops import HostWeights
    from cotrain_workers.engine.spec import AdapterSpec, Target

DEFAULT_SLOTS, DEFAULT_RANK = 32, 32  # what the cache holds by default
ZERO_SLOTS = 2  # of each pool


class WeightsNotFinite(ValueError):
    """The weights hold NaN or infinity."""


class WeightsUnfit(ValueError):
    """The weights were made for another base model."""


@dataclass(frozen=True)
class SlotLayout:
    """Where the padded matrices of each module lie in a slot."""

    rank: int  # padded
    offset_by_name: Mapping[str, tuple[int, int]]  # of A `[rank, in]` and B `[rank, padded out]`
    target_by_name: Mapping[str, Target]
    siblings: Mapping[str, tuple[str, ...]]
    """By module: those whose A matrices lie next to each other, as they read the same x."""
    size: int


@dataclass(eq=False)
class Pool:
    """The slots of one rank class."""

    layout: SlotLayout
    flat: torch.Tensor  # [slots, layout.size]
    free: list[int] = field(default_factory=list)

    @property
    def slot_bytes(self) -> int:
        """Return the size of one slot."""
        return self.layout.size * self.flat.element_size()

    @property
    def bytes(self) -> int:
        """Return the size of all slots."""
        return self.flat.shape[0] * self.slot_bytes

    def matrices(self, module: str, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy A `[n, rank, in]` and scale * B^T `[n, rank, padded out]` of `slots`, int64 `[n]`."""
        a, b = (part.index_select(0, slots) for part in self._parts(module))
        return self._shaped(module, a, b)

    def repeated(self, module: str, slot: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and scale * B^T of one slot, seen `n` times without a copy."""
        a, b = (part[slot : slot + 1].expand(n, -1) for part in self._parts(module))
        return self._shaped(module, a, b)

    def stacked_a(self, siblings: tuple[str, ...]) -> torch.Tensor:
        """Return A of some siblings, of all slots, without a copy: `[slots, siblings * rank, in]`."""
        at, _ = self.layout.offset_by_name[siblings[0]]
        width = self.layout.target_by_name[siblings[0]].inputs
        rows = len(siblings) * self.layout.rank
        return self.flat[:, at : at + rows * width].view(-1, rows, width)

    def stacked_b(self, module: str) -> torch.Tensor:
        """Return scale * B^T of all slots, without a copy: `[slots, rank, padded out]`."""
        return self._shaped(module, *self._parts(module))[1]

    def grow(self, slots: int) -> None:
        """Add free slots; the first and the last stay zero, for rows of no adapter of this pool."""
        count = max(len(self.flat), ZERO_SLOTS)
        grown = self.flat.new_zeros(count + slots, self.layout.size)
        grown[: len(self.flat)] = self.flat
        self.flat = grown
        self.free += range(count + slots - 2, count - 2, -1)

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
    """Some sampler weights on the device."""

    pool: Pool
    index: int
    modules: frozenset[str]  # those with matrices of their own; the others are zero
    users: int = 0


class WeightSlots:
    """Keeps the weights that were used last; never evicts what is in use."""

    def __init__(
        self,
        targets: Sequence[Target],
        device: torch.device,
        dtype: torch.dtype,
        load: Callable[[str], HostWeights],
        limit_bytes: int | None,
    ) -> None:
        self._targets = targets
        self._device = device
        self._dtype = dtype
        self._load = load
        self._limit = default_bytes(targets, dtype) if limit_bytes is None else limit_bytes
        self._slots: OrderedDict[str, Slot] = OrderedDict()  # least used first
        self._pools: dict[int, Pool] = {}
        self._next: tuple[str, HostWeights] | None = None  # loaded, and waiting for a slot

    def pin(self, key: str) -> Slot | None:
        """Return the slot of some weights and keep it until `unpin`; None while all are in use.

        Raises WeightsMissing, WeightsUnfit, WeightsNotFinite.
        """
        slot = self._slots.get(key) or self._fill(key)
        if slot is not None:
            slot.users += 1
            self._slots.move_to_end(key)
        return slot

    def unpin(self, key: str) -> None:
        """Let go of a slot."""
        self._slots[key].users -= 1

    def rivals(self, key: str) -> frozenset[str]:
        """Return the weights in use whose slot would do for the weights that `pin` had no slot for."""
        assert self._next is not None
        assert self._next[0] == key
        rank = slot_layout(self._targets, self._next[1].spec.rank).rank
        return frozenset(
            name
            for name, slot in self._slots.items()
            if slot.users and slot.pool.layout.rank == rank
        )

    def filled(self) -> list[Slot]:
        """Return every filled slot, the least used first."""
        return list(self._slots.values())

    def drop(self, key: str) -> None:
        """Forget weights that will not be named again, unless they are in use."""
        if key in self._slots and not self._slots[key].users:
            self._evict(key)

    def _fill(self, key: str) -> Slot | None:
        is_new = self._next is None or self._next[0] != key
        if is_new:
            self._next = (key, self._load(key))
        assert self._next is not None
        host = self._next[1]
        layout = slot_layout(self._targets, host.spec.rank)
        try:
            weights = self._checked(host, layout, is_new=is_new)
        except ValueError:
            self._next = None
            raise
        pool = self._pools.setdefault(layout.rank, self._new_pool(layout))
        if not (pool.free or self._free_slot(pool)):
            return None
        self._next = None
        slot = Slot(pool, pool.free.pop(), trained_modules(host, self._targets))
        lay_out(to_device(weights, self._device), host.spec, layout, pool.flat[slot.index])
        self._slots[key] = slot
        return slot

    def _checked(self, host: HostWeights, layout: SlotLayout, *, is_new: bool) -> torch.Tensor:
        """Return weights where they are, best on the device. Raises WeightsUnfit, WeightsNotFinite.

        Those that wait for a slot, and are asked for at every step, were looked at when they were new: that
        waits for the device.
        """
        found = host.on_device()
        weights = host.flat if found is None else found
        size = plan_layout(host.spec, list(layout.target_by_name.values())).size
        if weights.shape != (size,):
            raise WeightsUnfit(f"The weights hold {weights.numel()} values, not {size}.")
        if is_new and not torch.isfinite(weights).all():
            raise WeightsNotFinite
        return weights

    def _new_pool(self, layout: SlotLayout) -> Pool:
        return Pool(layout, torch.zeros(0, layout.size, device=self._device, dtype=self._dtype))

    def _free_slot(self, pool: Pool) -> bool:
        """Free a slot of a pool: by growing, by evicting, or by giving up pools none of whose slots is in use."""
        affordable = self._affordable(pool)
        if affordable > 0:
            pool.grow(min(affordable, max(1, len(pool.flat) - ZERO_SLOTS)))
            return True
        unused = [key for key, slot in self._slots.items() if not slot.users]
        for key in unused:
            if self._slots[key].pool is pool:
                self._evict(key)
                return True
        for rank, other in list(self._pools.items()):
            if other is not pool and not any(
                s.users for s in self._slots.values() if s.pool is other
            ):
                for key in [key for key, slot in self._slots.items() if slot.pool is other]:
                    self._evict(key)
                del self._pools[rank]
        is_alone = self._bytes() == 0  # larger than the limit, and nothing else is there
        if is_alone or self._affordable(pool) > 0:
            pool.grow(1)
            return True
        return False

    def _affordable(self, pool: Pool) -> int:
        """Return by how many slots a pool may grow."""
        more = (self._limit - self._bytes()) // pool.slot_bytes
        return more if len(pool.flat) else more - ZERO_SLOTS

    def _evict(self, key: str) -> None:
        slot = self._slots.pop(key)
        slot.pool.free.append(slot.index)

    def _bytes(self) -> int:
        return sum(pool.bytes for pool in self._pools.values())


def default_bytes(targets: Sequence[Target], dtype: torch.dtype) -> int:
    """Return what the cache holds by default."""
    slots = DEFAULT_SLOTS + ZERO_SLOTS
    return slots * slot_layout(targets, DEFAULT_RANK).size * dtype.itemsize


def slot_layout(targets: Sequence[Target], rank: int) -> SlotLayout:
    """Lay out the padded matrices of every module for adapters of a rank."""
    padded = padded_rank(rank)
    offsets: dict[str, tuple[int, int]] = {}
    siblings: dict[str, tuple[str, ...]] = {}
    end = 0
    for together in neighbours(targets):
        size_a = aligned(padded * together[0].inputs)
        at_b = end + len(together) * size_a
        for at, target in enumerate(together):
            offsets[target.name] = (end + at * size_a, at_b)
            at_b += padded * aligned(target.outputs)
            siblings[target.name] = tuple(each.name for each in together)
        end = at_b
    return SlotLayout(padded, offsets, {each.name: each for each in targets}, siblings, end)


def neighbours(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Yield modules that read one x, as far as their A matrices can lie side by side without a gap."""
    for _, same in groupby(targets, key=shared_input):
        together = list(same)
        if aligned(MIN_RANK * together[0].inputs) == MIN_RANK * together[0].inputs:
            yield together
        else:
            yield from ([target] for target in together)


def lay_out(
    weights: torch.Tensor, spec: AdapterSpec, layout: SlotLayout, slot: torch.Tensor
) -> None:
    """Lay an adapter's arena `[size]` out in a slot `[layout.size]` of the same device."""
    rank = spec.rank
    own = plan_layout(spec, list(layout.target_by_name.values()))
    scaled = own.views(weights * spec.scale)
    to, found = [], []
    for name, pair in own.views(weights).items():
        at_a, at_b = layout.offset_by_name[name]
        outputs, inputs = len(pair.b), pair.a.shape[1]
        width = aligned(outputs)
        to.append(slot[at_a : at_a + rank * inputs].view(rank, inputs))
        to.append(slot[at_b : at_b + rank * width].view(rank, width)[:, :outputs])
        found += [pair.a, scaled[name].b.t()]
    slot.zero_()
    torch._foreach_copy_(to, found)


def trained_modules(host: HostWeights, targets: Sequence[Target]) -> frozenset[str]:
    """Return the names of the modules that the weights change."""
    return frozenset(target.name for target in targets if host.spec.trains(target.family))


class PinnedWeights:
    """Slots by the key of their weights; the base model alone, None, needs no slot."""

    def __init__(self, weights: WeightSlots) -> None:
        self._weights = weights
        self.slots: dict[str | None, Slot | None] = {None: None}

    def pin(self, key: str | None) -> bool:
        """Keep weights for one sequence more; False while all slots are in use.

        Raises:
            WeightsMissing, WeightsNotFinite, WeightsUnfit: as `WeightSlots.pin`.
        """
        if key is not None:
            slot = self._weights.pin(key)
            if slot is None:
                return False
            self.slots[key] = slot
        return True

    def unpin(self, key: str | None) -> None:
        """Keep weights for one sequence less."""
        if key is not None:
            self._weights.unpin(key)
            slot = self.slots[key]
            if slot is not None and not slot.users:
                del self.slots[key]  # else it would keep the memory of a pool that was given up
