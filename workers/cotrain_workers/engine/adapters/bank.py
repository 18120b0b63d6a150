"""Adapters in memory, each with four arenas: weights, gradient, and both Adam moments.

An arena is one 1-D tensor with the matrices of all modules as views. Zeroing, clipping, Adam,
hashing and copying are therefore one operation per arena.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from cotrain_workers.engine.adapters.adapter import OPEN_GRADIENT, Adapter, arena_dtype
from cotrain_workers.engine.adapters.copy_streams import CopyStream, HostArenas, carry_in, carry_out
from cotrain_workers.engine.adapters.residency import (
    AdapterSize,
    Moves,
    device_groups,
    moves_for,
    over_budget,
    prefetch_moves,
)
from cotrain_workers.engine.ops import HostOptimizer, HostWeights
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout, seed_of, shape_of
from cotrain_workers.engine.turns import Yielding, run_to_end

#: Arenas of an adapter between cycles, besides "grads" if a gradient is pending.
ARENAS_AT_REST = ("weights", "m", "v")
#: Number of random values between two yield points, which takes about 20 ms.
DRAWN_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class AdapterState:
    """A run's adapter, copied to the host. The four tensors are 1-D, of one length, in arena layout."""

    spec: AdapterSpec
    weights: torch.Tensor
    grads: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    step: int  # optimizer steps taken
    grads_pending: bool  # a gradient waits for the next optimizer step

    @classmethod
    def of(cls, spec: AdapterSpec, weights: HostWeights, moments: HostOptimizer | None) -> Self:
        """Return the state of a checkpoint, without a pending gradient; zero moments if it has none."""
        zeros, flat = torch.zeros_like(weights.flat), weights.flat
        if moments is None:
            return cls(spec, flat, zeros, zeros, zeros, 0, grads_pending=False)
        return cls(spec, flat, zeros, moments.m, moments.v, moments.step, grads_pending=False)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the whole state; equal digests mean equal bits."""
        hasher = hashlib.sha256(repr((self.spec, self.step, self.grads_pending)).encode())
        for arena in (self.weights, self.grads, self.m, self.v):
            hasher.update(arena.contiguous().numpy().data)
        return hasher.hexdigest()


@dataclass(frozen=True)
class StateCopy:
    """Copy of a run's state on its way to the host."""

    spec: AdapterSpec
    step: int
    grads_pending: bool
    arenas: HostArenas

    def state(self) -> AdapterState:
        """Return the state once it has arrived; any thread may wait for it."""
        arenas = self.arenas.whole()
        arenas.pop(OPEN_GRADIENT, None)  # an offloaded adapter has it, but it is not state
        grads = arenas.pop("grads", None)
        return AdapterState(
            self.spec,
            grads=torch.zeros_like(arenas["weights"]) if grads is None else grads,
            step=self.step,
            grads_pending=self.grads_pending,
            **arenas,
        )


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
        self.on_drop: Callable[[str], None] = lambda run: None
        """Called with the run of each dropped adapter."""

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
            adapter.hold_compute()
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


def initial_weights(spec: AdapterSpec, layout: Layout) -> torch.Tensor:
    """Return a fresh weight arena, fp32 `[layout.size]` on the host.

    A is Kaiming-uniform with `a = sqrt(5)`, as in PEFT: uniform in +-1/sqrt(inputs). Each module draws from its own
    generator. Its A therefore depends on the seed, its name and the rank, and on no other module.
    """
    return run_to_end(draw_weights(spec, layout))


def draw_weights(spec: AdapterSpec, layout: Layout) -> Yielding[torch.Tensor]:
    """Return `initial_weights`, with a yield point after every DRAWN_AT_ONCE values."""
    arena = torch.zeros(layout.size)
    views = layout.views(arena)
    drawn = 0
    for target in layout.targets:
        bound = 1.0 / math.sqrt(target.inputs)
        generator = torch.Generator().manual_seed(seed_of(f"{spec.seed}:{target.name}"))
        a = views[target.name].a.uniform_(-bound, bound, generator=generator)
        drawn += a.numel()
        if drawn >= DRAWN_AT_ONCE:
            drawn = 0
            yield
    return arena
