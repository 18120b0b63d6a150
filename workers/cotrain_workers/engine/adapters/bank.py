"""Adapters in memory, each with four arenas: weights, gradient, and both Adam moments.

An arena is one 1-D tensor with the matrices of all modules as views. Zeroing, clipping, Adam, hashing and copying are
therefore one operation per arena.

Pure functions select the adapters on the device: those of the cycle first, then the most recently used.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from cotrain_workers.engine.adapters.adapter import Adapter, arena_dtype, initial_weights
from cotrain_workers.engine.adapters.copies import (
    OPEN_GRADIENT,
    AdapterState,
    CopyStream,
    HostArenas,
    StateCopy,
    carry_in,
    carry_out,
)
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout, shape_of

#: Arenas of an adapter between cycles, besides "grads" if a gradient is pending.
ARENAS_AT_REST = ("weights", "m", "v")
#: Share of adapters in the device memory next to the base model. Micro-batches take up to 0.54 of
#: it (`memory_model.py`), key-value memory 0.25 (`kv_cache.py`).
ADAPTER_SHARE = 0.2
GIB = 1 << 30


@dataclass(frozen=True)
class AdapterSize:
    """Size and location of an adapter."""

    run: str
    bytes: int  # on the device
    is_on_device: bool


@dataclass(frozen=True)
class Moves:
    """Copies to make, in order: first out, then in."""

    offload: Sequence[str]
    bring: Sequence[str]


class AdapterBank:
    """Adapters of every run of this engine, on the device or offloaded to host memory.

    `adapter_bytes` limits their bytes on the device, and `host_bytes` on the host. None is no limit.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        device: torch.device,
        compute_dtype: torch.dtype,
        *,
        adapter_bytes: int | None = None,
        host_bytes: int | None = None,
        copy_stream: CopyStream | None = None,
    ) -> None:
        self._targets = targets
        self._device = device
        self._compute_dtype = compute_dtype
        self._arena_dtype = arena_dtype(compute_dtype)
        self._adapter_bytes = adapter_bytes
        self._host_bytes = host_bytes
        self._copy_stream = copy_stream or CopyStream(device)
        # Order: the least recently used first.
        self._adapter_by_run: OrderedDict[str, Adapter] = OrderedDict()
        self._in_use: frozenset[str] = frozenset()
        self.offloaded = 0  # number of adapters on the host alone. Any thread may read it.
        self._layout_by_shape: dict[tuple[object, ...], Layout] = {}
        self.base_weights: Mapping[str, torch.Tensor] = {}
        """Weights of the base model by module, for uploads that contain copies of them."""
        self.on_drop: Callable[[str], None] = lambda run: None  # called with the run of each dropped adapter

    def __contains__(self, run: object) -> bool:
        return run in self._adapter_by_run

    def __getitem__(self, run: str) -> Adapter:
        return self._adapter_by_run[run]

    @property
    def runs(self) -> frozenset[str]:
        """Runs with an adapter in memory."""
        return frozenset(self._adapter_by_run)

    def create(self, run: str, spec: AdapterSpec, weights: torch.Tensor | None = None) -> Adapter:
        """Add an adapter at step 0, with a copy of `weights` `[layout.size]` or with fresh ones.

        Raises ValueError if the weights were made for other modules than this base model has.
        """
        layout = self.layout_of(spec)
        if weights is None:
            weights = initial_weights(spec, layout)
        return self._insert(run, Adapter(spec, layout, 0, False, self._compute_dtype, {}), {"weights": weights})

    def drop(self, run: str) -> None:
        """Remove a run's adapter, if any."""
        self.on_drop(run)
        dropped = self._adapter_by_run.pop(run, None)
        if dropped is not None and dropped.on_host is not None:
            self.offloaded -= 1

    def state(self, run: str) -> AdapterState:
        """Copy a run's adapter to the host. Raises KeyError for an unknown run."""
        return self.copy_out(run).state()

    def copy_out(self, run: str) -> StateCopy:
        """Start a copy of a run's adapter to the host, and return at once.

        Call it only between cycles, because the next cycle waits for the copy, and a running one
        does not. Raises KeyError for an unknown run.
        """
        adapter = self._adapter_by_run[run]
        copied = adapter.on_host
        if copied is None:
            arenas = adapter.worth_copying()
            arenas.pop(OPEN_GRADIENT, None)
            copied = carry_out(self._copy_stream, arenas)
            adapter.arrival = copied.arrival  # copies keep their order, so earlier ones end before
        return StateCopy(adapter.spec, adapter.step, adapter.grads_pending, copied)

    def copy_arenas(self, run: str, *arenas: str) -> HostArenas:
        """Start a copy of some arenas of a run to the host, within a cycle that has it on the device."""
        adapter = self[run]
        copied = carry_out(self._copy_stream, {name: adapter.arenas[name] for name in arenas})
        adapter.arrival = copied.arrival
        return copied

    def restore(self, run: str, state: AdapterState) -> Adapter:
        """Replace any adapter of this run by a copy of a state.

        Raises ValueError if the state was made for other modules than this base model has.
        """
        layout = self.layout_of(state.spec)
        adapter = Adapter(state.spec, layout, state.step, state.grads_pending, self._compute_dtype, {})
        names = (*ARENAS_AT_REST, *(["grads"] if state.grads_pending else []))
        return self._insert(run, adapter, {name: getattr(state, name) for name in names})

    def _insert(self, run: str, adapter: Adapter, arenas: Mapping[str, torch.Tensor]) -> Adapter:
        """Replace any adapter of this run, with copies of `arenas`; missing moments are zero."""
        size = adapter.layout.size
        if arenas["weights"].shape != (size,):
            raise ValueError(f"The state holds {arenas['weights'].numel()} values, not {size}.")
        self.drop(run)
        sizes = [*self._sizes(), self._size_of(run, adapter)]
        self._apply(moves_for(sizes, {run, *self._in_use}, self._adapter_bytes))
        for name in dict.fromkeys((*ARENAS_AT_REST, *arenas)):
            # Zeros are created on the device, because a copy would take as long as the weights.
            adapter.arenas[name] = (
                arenas[name].to(self._device, self._arena_dtype, copy=True)
                if name in arenas
                else torch.zeros(size, dtype=self._arena_dtype, device=self._device)
            )
        self._adapter_by_run[run] = adapter
        return adapter

    def device_groups(self, runs: Sequence[str]) -> list[list[str]]:
        """Split the runs of a cycle into groups that each fit on the device; usually into one."""
        sizes = {run: self.device_bytes(self[run]) for run in runs if run in self}
        return device_groups(runs, sizes, self._adapter_bytes)

    def bring_in(self, runs: Sequence[str]) -> dict[str, Adapter]:
        """Bring these runs to the device for the next computation, and offload others if necessary.

        Return the adapters of the known runs.
        """
        known = {run: self[run] for run in runs if run in self}
        self._apply(moves_for(self._sizes(), known, self._adapter_bytes))
        for run, adapter in known.items():
            self._adapter_by_run.move_to_end(run)
            adapter.await_copies()
        self._in_use = frozenset(known)
        return known

    def prefetch(self, runs: Sequence[str]) -> None:
        """Start to bring in the adapters of the next cycle that fit next to those in use.

        Unknown runs are skipped. Call it between cycles or at their yield points.
        """
        self._apply(prefetch_moves(self._sizes(), runs, self._in_use, self._adapter_bytes))
        for run in runs:
            if run in self:
                self._adapter_by_run.move_to_end(run)  # others are offloaded before it

    def release(self) -> None:
        """Mark the end of the cycle: all adapters may be offloaded."""
        self._in_use = frozenset()

    def runs_to_evict(self) -> list[str]:
        """Return the runs to drop until host memory is within its limit, the least recently used first.

        The caller must store a snapshot of each before it drops it.
        """
        sizes = {run: self._host_bytes_of(adapter) for run, adapter in self._adapter_by_run.items()}
        on_host = {run: size for run, size in sizes.items() if size and run not in self._in_use}
        return over_budget(on_host, self._host_bytes)

    @property
    def device_limit_bytes(self) -> int | None:
        """Limit of the adapters on the device in bytes; None: no limit."""
        return self._adapter_bytes

    @property
    def by_tier(self) -> dict[str, tuple[int, int]]:
        """Number of adapters and their bytes, by location: `device` or `host`. Any thread may read it."""
        adapters = list(self._adapter_by_run.values())
        on_host = [copied.bytes for each in adapters if (copied := each.on_host) is not None]
        on_device = [self.device_bytes(each) for each in adapters if each.on_host is None]
        return {"device": (len(on_device), sum(on_device)), "host": (len(on_host), sum(on_host))}

    def device_bytes(self, adapter: Adapter) -> int:
        """Return the device bytes of a training adapter: four arenas, five with an open pass, and the compute copy."""
        wide, narrow = self._arena_dtype, self._compute_dtype
        copy = 0 if narrow == wide else narrow.itemsize
        return adapter.layout.size * ((4 + adapter.has_open_gradient) * wide.itemsize + copy)

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return the positions of the matrices of an adapter of this spec in its arenas."""
        shape = shape_of(spec)
        if shape not in self._layout_by_shape:
            self._layout_by_shape[shape] = plan_layout(spec, self._targets)
        return self._layout_by_shape[shape]

    def _host_bytes_of(self, adapter: Adapter) -> int:
        if adapter.on_host is not None:
            return adapter.on_host.bytes
        return self.device_bytes(adapter) if self._device.type == "cpu" else 0

    def _sizes(self) -> list[AdapterSize]:
        return [self._size_of(run, adapter) for run, adapter in self._adapter_by_run.items()]

    def _size_of(self, run: str, adapter: Adapter) -> AdapterSize:
        return AdapterSize(run, self.device_bytes(adapter), is_on_device=adapter.on_host is None)

    def _apply(self, moves: Moves) -> None:
        for run in moves.offload:
            adapter = self[run]
            adapter.on_host = carry_out(self._copy_stream, adapter.worth_copying())
            adapter.forget_arenas()
            self.offloaded += 1
        for run in moves.bring:
            adapter = self[run]
            assert adapter.on_host is not None
            adapter.arenas, adapter.arrival = carry_in(self._copy_stream, adapter.on_host, self._device)
            adapter.on_host = None
            if not adapter.has_open_gradient:
                adapter.drop_open_gradient()  # its pass ended while the adapter was on the host
            self.offloaded -= 1


def moves_for(sizes: Sequence[AdapterSize], needed: Collection[str], budget: int | None) -> Moves:
    """Bring in all adapters of a cycle, and offload the fewest others, the least recently used first.

    `sizes` are in order of use, the least used first. Needed adapters come in even if they do not fit.
    """
    bring = [adapter for adapter in sizes if adapter.run in needed and not adapter.is_on_device]
    if budget is None:
        return Moves([], [adapter.run for adapter in bring])
    on_device = [adapter for adapter in sizes if adapter.is_on_device]
    over = sum(adapter.bytes for adapter in [*on_device, *bring]) - budget
    offload = []
    for adapter in on_device:
        if over <= 0:
            break
        if adapter.run not in needed:
            offload.append(adapter.run)
            over -= adapter.bytes
    return Moves(offload, [adapter.run for adapter in bring])


def prefetch_moves(
    sizes: Sequence[AdapterSize], next_runs: Sequence[str], in_use: Collection[str], budget: int | None
) -> Moves:
    """Bring in the adapters of the next cycle, in its order, while they fit next to the adapters in use."""
    adapter_by_run = {adapter.run: adapter for adapter in sizes}
    needed = set(in_use)
    taken = sum(adapter.bytes for adapter in sizes if adapter.run in needed)
    for run in next_runs:
        adapter = adapter_by_run.get(run)
        if adapter is None or run in needed:
            continue
        if budget is not None and taken + adapter.bytes > budget:
            break
        needed.add(run)
        taken += adapter.bytes
    moves = moves_for(sizes, needed, budget)
    return moves if moves.bring else Moves([], [])


def device_groups(runs: Sequence[str], bytes_by_run: Mapping[str, int], budget: int | None) -> list[list[str]]:
    """Split the runs of a cycle into the fewest groups, in order, that fit on the device one at a time.

    There is almost always one group. The budget only affects which runs compute together. An adapter larger than
    the budget is a group of its own.
    """
    groups: list[list[str]] = [[]]
    left = budget
    for run in runs:
        size = bytes_by_run.get(run, 0)
        if left is not None and size > left and groups[-1]:
            groups.append([])
            left = budget
        groups[-1].append(run)
        left = None if left is None else left - size
    return groups


def over_budget(bytes_by_run: Mapping[str, int], budget: int | None) -> list[str]:
    """Return the runs to evict to free enough host memory; `bytes_by_run` has the least used first."""
    if budget is None:
        return []
    over, leaving = sum(bytes_by_run.values()) - budget, []
    for run, size in bytes_by_run.items():
        if over <= 0:
            break
        leaving.append(run)
        over -= size
    return leaving


def adapter_budget(device_bytes: int, taken_bytes: int) -> int:
    """Return the default device bytes for adapters: a share of the rest, in whole GiB.

    It is based on all memory instead of the free memory, in whole GiB. The runs that compute
    together may depend on it, so it must be the same after a restart.
    """
    return max(GIB, int((device_bytes - taken_bytes) * ADAPTER_SHARE) // GIB * GIB)
