"""Sampler weights on the device: a cache of slots, filled from adapters that are there, or from the host.

Pools share one limit: one that needs a slot takes memory from those with slots that are not in use.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from cotrain_workers.engine.decoding.slot_pool import (
    ZERO_SLOTS,
    Pool,
    Slot,
    SlotLayout,
    lay_out,
    slot_layout,
)
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import Target, plan_layout

DEFAULT_SLOTS, DEFAULT_RANK = 32, 32  # what the cache holds by default
#: After its last use a slot is kept so long from a pool of another rank class that could do without it. Pools
#: that change size are copied, and a GPU records its graphs over them again: not for every request.
KEPT_S = 1.0
#: Of so many weights that wait for a slot the rank is remembered, so that they are not loaded at every step.
MAX_WAITING = 10_000


class WeightsNotFinite(ValueError):
    """The weights hold NaN or infinity."""


class WeightsUnfit(ValueError):
    """The weights were made for another base model."""


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
        self._last_loaded: tuple[str, HostWeights] | None = None
        self._waiting: dict[str, SlotLayout] = {}  # those that had no slot when they were asked for

    def pin(self, key: str, *, at_once: bool = False) -> Slot | None:
        """Return the slot of some weights and keep it until `unpin`; None while there is none for them.

        Those that another rank class used lately keep their memory, unless the slot must be had `at_once`.
        Raises WeightsMissing, WeightsUnfit, WeightsNotFinite.
        """
        slot = self._slots.get(key) or self._fill(key, at_once=at_once)
        if slot is not None:
            slot.users += 1
            self._slots.move_to_end(key)
        return slot

    def unpin(self, key: str) -> None:
        """Let go of a slot."""
        slot = self._slots[key]
        slot.users -= 1
        slot.unpinned_at = time.monotonic()

    def rivals(self, key: str) -> frozenset[str]:
        """Return the weights in use whose slot would do for the weights that `pin` had no slot for."""
        rank = self._waiting[key].rank
        return frozenset(
            name
            for name, slot in self._slots.items()
            if slot.users and slot.pool.layout.rank == rank
        )

    def in_use(self) -> frozenset[str]:
        """Return all weights in use."""
        return frozenset(name for name, slot in self._slots.items() if slot.users)

    def fits_without(self, key: str, given_up: Collection[str]) -> bool:
        """Return whether the weights that `pin` had no slot for would have one `at_once`, were those unused."""
        rank = self._waiting[key].rank
        taken = Counter(
            slot.pool.layout.rank
            for name, slot in self._slots.items()
            if slot.users and name not in given_up
        )
        has_slot = taken[rank] < len(self._pools[rank].flat) - ZERO_SLOTS
        return has_slot or self._fits(rank, taken)

    def filled(self) -> list[Slot]:
        """Return every filled slot, the least used first."""
        return list(self._slots.values())

    def drop(self, key: str) -> None:
        """Forget weights that will not be named again, unless they are in use."""
        self._waiting.pop(key, None)
        if key in self._slots and not self._slots[key].users:
            self._evict(key)

    def _fill(self, key: str, *, at_once: bool) -> Slot | None:
        layout = self._waiting.get(key)
        if layout is None:
            layout = slot_layout(self._targets, self._loaded(key).spec.rank)
        pool = self._pools.setdefault(layout.rank, self._new_pool(layout))
        if not (pool.free or self._free_slot(pool, at_once=at_once)):
            self._wait(key, layout)
            return None
        self._waiting.pop(key, None)
        host = self._loaded(key)
        self._last_loaded = None
        slot = Slot(pool, pool.free.pop(), trained_modules(host, self._targets))
        weights = to_device(found_weights(host), self._device)
        lay_out(weights, host.spec, layout, pool.flat[slot.index])
        self._slots[key] = slot
        return slot

    def _loaded(self, key: str) -> HostWeights:
        """Return weights that fit; they are kept until others are loaded, or a slot has them."""
        if self._last_loaded is None or self._last_loaded[0] != key:
            host = self._load(key)
            self._check(host)
            self._last_loaded = key, host
        return self._last_loaded[1]

    def _wait(self, key: str, layout: SlotLayout) -> None:
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()  # each is loaded once more
        self._waiting[key] = layout

    def _check(self, host: HostWeights) -> None:
        """Raise WeightsUnfit or WeightsNotFinite; waits for the device."""
        weights = found_weights(host)
        size = plan_layout(host.spec, self._targets).size
        if weights.shape != (size,):
            raise WeightsUnfit(f"The weights hold {weights.numel()} values, not {size}.")
        if not torch.isfinite(weights).all():
            raise WeightsNotFinite

    def _new_pool(self, layout: SlotLayout) -> Pool:
        return Pool(layout, torch.zeros(0, layout.size, device=self._device, dtype=self._dtype))

    def _free_slot(self, pool: Pool, *, at_once: bool) -> bool:
        """Free a slot of a pool: by growing, by evicting, or with memory that other pools do not use."""
        affordable = self._affordable(pool)
        if affordable > 0:
            pool.grow(min(affordable, max(1, len(pool.flat) - ZERO_SLOTS)))
            return True
        for key, slot in self._slots.items():
            if slot.pool is pool and not slot.users:
                self._evict(key)
                return True
        if not self._shrink_others(pool, at_once=at_once):
            return False
        pool.grow(1)
        return True

    def _shrink_others(self, pool: Pool, *, at_once: bool) -> bool:
        """Have memory for one slot more of a full pool; False if others use, or lately used, too much of it."""
        rank = pool.layout.rank
        taken = Counter(slot.pool.layout.rank for slot in self._slots.values())
        evicted, now = [], time.monotonic()
        for key, slot in self._slots.items():
            if self._fits(rank, taken):
                break
            is_kept = slot.users or (not at_once and now - slot.unpinned_at < KEPT_S)
            if slot.pool is not pool and not is_kept:
                evicted.append(key)
                taken[slot.pool.layout.rank] -= 1
        if not self._fits(rank, taken):
            return False
        for key in evicted:
            self._evict(key)
        for other in [each for each in self._pools.values() if each is not pool]:
            filled = [slot for slot in self._slots.values() if slot.pool is other]
            if not filled:
                del self._pools[other.layout.rank]
            elif other.free:
                other.shrink(filled)
        return True

    def _fits(self, rank: int, taken: Mapping[int, int]) -> bool:
        """Return whether a pool has memory for one slot more, where every pool has only the slots it must hold."""
        others = sum(
            (slots + ZERO_SLOTS) * self._pools[each].slot_bytes
            for each, slots in taken.items()
            if slots and each != rank
        )
        own = taken.get(rank, 0)
        is_alone = not (others or own)  # larger than the limit, and nothing else is there
        return (
            is_alone
            or others + (own + 1 + ZERO_SLOTS) * self._pools[rank].slot_bytes <= self._limit
        )

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


def found_weights(host: HostWeights) -> torch.Tensor:
    """Return weights where they are, best on the device."""
    found = host.on_device()
    return host.flat if found is None else found


def trained_modules(host: HostWeights, targets: Sequence[Target]) -> frozenset[str]:
    """Return the names of the modules that the weights change."""
    return frozenset(target.name for target in targets if host.spec.trains(target.family))


class PinnedWeights:
    """Slots by the key of their weights; the base model alone, None, needs no slot."""

    def __init__(self, weights: WeightSlots) -> None:
        self._weights = weights
        self.slots: dict[str | None, Slot | None] = {None: None}

    def pin(self, key: str | None, *, at_once: bool = False) -> bool:
        """Keep weights for one sequence more; False while there is no slot for them.

        Raises:
            WeightsMissing, WeightsNotFinite, WeightsUnfit: as `WeightSlots.pin`.
        """
        if key is not None:
            slot = self._weights.pin(key, at_once=at_once)
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
