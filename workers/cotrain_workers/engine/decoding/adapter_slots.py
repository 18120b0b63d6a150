"""Cache of sampler weights on the device, in slots filled from resident adapters or from the host.

Pools of different rank share one memory limit. A pool that needs a slot takes memory from pools with unused slots.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from cotrain_workers.engine.adapters.adapter import is_all_finite
from cotrain_workers.engine.decoding.slot_pool import Filling, Pool, Slot, SlotLayout, filling_of, slot_layout
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.ops import HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Target, has_experts, shape_of

DEFAULT_SLOTS, DEFAULT_RANK = 32, 32  # default size of the cache
#: Seconds for which an unused slot is protected from pools of another rank. Resizing a pool copies it, so this must not
#: happen for every request.
KEPT_S = 1.0
#: Maximum number of waiting weights whose rank is cached, so that they are not loaded at every step.
MAX_WAITING = 10_000


class WeightsNotFinite(ValueError):
    """The weights hold NaN or infinity."""


class WeightsUnfit(ValueError):
    """Weights made for another base model."""


class WeightSlots:
    """LRU cache of sampler weights that never evicts weights in use."""

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
        self._slots: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self._pools: dict[tuple[int, bool], Pool] = {}
        self.lent: Mapping[str, HostWeights] = {}  # weights for a check of the decoder
        self._last_loaded: tuple[str, HostWeights] | None = None
        self._filling_by_shape: dict[tuple[object, ...], Filling] = {}
        self._waiting: dict[str, SlotLayout] = {}  # weights for which `pin` found no slot

    def pin(self, key: str, *, at_once: bool = False) -> Slot | None:
        """Return the slot of some weights and hold it until `unpin`; None if no slot is available.

        Weights of another rank class that were used within KEPT_S keep their memory, unless `at_once` is set.
        Raises WeightsMissing, WeightsUnfit, WeightsNotFinite.
        """
        slot = self._slots.get(key) or self._fill(key, at_once=at_once)
        if slot is not None:
            slot.users += 1
            self._slots.move_to_end(key)
        return slot

    def unpin(self, key: str | None) -> None:
        """Release one use of a slot. None, the base model alone, has no slot."""
        if key is not None:
            slot = self._slots[key]
            slot.users -= 1
            slot.unpinned_at = time.monotonic()

    def slot_of(self, key: str | None) -> Slot | None:
        """Return the slot of pinned weights; None for the base model alone."""
        return None if key is None else self._slots[key]

    def rivals(self, key: str) -> frozenset[str]:
        """Return the weights in use in the pool in which `pin` found no slot for `key`."""
        kind = self._waiting[key].kind
        return frozenset(name for name, slot in self._slots.items() if slot.users and slot.pool.layout.kind == kind)

    def in_use(self) -> frozenset[str]:
        """Return all weights in use."""
        return frozenset(name for name, slot in self._slots.items() if slot.users)

    def fits_without(self, key: str, given_up: Collection[str]) -> bool:
        """Return True if `pin` with `at_once` would find a slot for waiting weights without `given_up`."""
        kind = self._waiting[key].kind
        taken = Counter(
            slot.pool.layout.kind for name, slot in self._slots.items() if slot.users and name not in given_up
        )
        has_slot = taken[kind] < len(self._pools[kind].flat)
        return has_slot or self._fits(kind, taken)

    def filled(self) -> list[Slot]:
        """Return every filled slot, least recently used first."""
        return list(self._slots.values())

    def drop(self, key: str) -> None:
        """Drop weights that no later request uses, unless they are in use now."""
        self._waiting.pop(key, None)
        if key in self._slots and not self._slots[key].users:
            self._evict(key)

    def _fill(self, key: str, *, at_once: bool) -> Slot | None:
        layout = self._waiting.get(key)
        if layout is None:
            layout = self._filling(self._loaded(key).spec).layout
        if layout.kind not in self._pools:
            memory = torch.zeros(0, layout.size, device=self._device, dtype=self._dtype)
            self._pools[layout.kind] = Pool(layout, memory)
        pool = self._pools[layout.kind]
        if not (pool.free or self._free_slot(pool, at_once=at_once)):
            self._wait(key, layout)
            return None
        self._waiting.pop(key, None)
        host = self._loaded(key)
        self._last_loaded = None
        filling = self._filling(host.spec)
        slot = Slot(pool, pool.free.pop(), filling.modules)
        weights = to_device(found_weights(host), self._device)
        filling.write(weights, host.spec.scale, pool.flat[slot.index])
        self._slots[key] = slot
        return slot

    def _loaded(self, key: str) -> HostWeights:
        """Return checked weights, cached until other weights are loaded or a slot is filled."""
        if self._last_loaded is None or self._last_loaded[0] != key:
            host = self.lent.get(key) or self._load(key)
            self._check(host)
            self._last_loaded = key, host
        return self._last_loaded[1]

    def _wait(self, key: str, layout: SlotLayout) -> None:
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            self._waiting.clear()  # each of them is loaded once more
        self._waiting[key] = layout

    def _check(self, host: HostWeights) -> None:
        """Raise WeightsUnfit or WeightsNotFinite; waits for the device."""
        weights = found_weights(host)
        size = self._filling(host.spec).arena_size
        if weights.shape != (size,):
            raise WeightsUnfit(f"The weights hold {weights.numel()} values, not {size}.")
        if not is_all_finite(weights):
            raise WeightsNotFinite

    def _filling(self, spec: AdapterSpec) -> Filling:
        shape = shape_of(spec)
        if shape not in self._filling_by_shape:
            per_expert = spec.per_expert and has_experts(self._targets)
            layout = slot_layout(self._targets, spec.rank, per_expert=per_expert)
            self._filling_by_shape[shape] = filling_of(spec, self._targets, layout)
        return self._filling_by_shape[shape]

    def _free_slot(self, pool: Pool, *, at_once: bool) -> bool:
        """Free a slot of a pool: grow it, evict, or take memory that other pools do not use."""
        affordable = self._affordable(pool)
        if affordable > 0:
            pool.grow(min(affordable, max(1, len(pool.flat))))
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
        """Free memory for one more slot of a full pool; return False if other pools use it or used it recently."""
        kind = pool.layout.kind
        taken = Counter(slot.pool.layout.kind for slot in self._slots.values())
        evicted, now = [], time.monotonic()
        for key, slot in self._slots.items():
            if self._fits(kind, taken):
                break
            is_kept = slot.users or (not at_once and now - slot.unpinned_at < KEPT_S)
            if slot.pool is not pool and not is_kept:
                evicted.append(key)
                taken[slot.pool.layout.kind] -= 1
        if not self._fits(kind, taken):
            return False
        for key in evicted:
            self._evict(key)
        for other in [each for each in self._pools.values() if each is not pool]:
            filled = [slot for slot in self._slots.values() if slot.pool is other]
            if not filled:
                del self._pools[other.layout.kind]
            elif other.free:
                other.shrink(filled)
        return True

    def _fits(self, kind: tuple[int, bool], taken: Mapping[tuple[int, bool], int]) -> bool:
        """Return True if one more slot fits when every pool is reduced to its `taken` slots."""
        others = sum(slots * self._pools[each].slot_bytes for each, slots in taken.items() if each != kind)
        own = taken.get(kind, 0)
        is_alone = not (others or own)  # a single slot may exceed the limit
        return is_alone or others + (own + 1) * self._pools[kind].slot_bytes <= self._limit

    def _affordable(self, pool: Pool) -> int:
        """Return the number of slots by which a pool may grow."""
        used_bytes = sum(each.bytes for each in self._pools.values())
        return (self._limit - used_bytes) // pool.slot_bytes

    def _evict(self, key: str) -> None:
        slot = self._slots.pop(key)
        slot.pool.free.append(slot.index)


def default_bytes(targets: Sequence[Target], dtype: torch.dtype) -> int:
    """Return the default size of the cache in bytes."""
    return DEFAULT_SLOTS * slot_layout(targets, DEFAULT_RANK).size * dtype.itemsize


def found_weights(host: HostWeights) -> torch.Tensor:
    """Return the flat weights, from the device if they are resident there."""
    found = host.on_device()
    return host.flat if found is None else found
