"""The adapters in memory: one flat arena each for weights, gradient and both Adam moments.

Zeroing, clipping, Adam, hashing and copying are one operation on a 1-D tensor; every matrix is a view.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cotrain_workers.spec import AdapterSpec, Layout, Pair, plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_workers.spec import Target


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

    def digest(self) -> str:
        """Return the SHA-256 (hex) of everything in it; equal digests mean equal bits."""
        hasher = hashlib.sha256(repr((self.spec, self.step, self.grads_pending)).encode())
        for arena in (self.weights, self.grads, self.m, self.v):
            hasher.update(arena.contiguous().numpy().data)
        return hasher.hexdigest()


@dataclass(frozen=True)
class Gradient:
    """A gradient arena and every module's matrices in it."""

    flat: torch.Tensor
    views: dict[str, Pair]


@dataclass
class ComputeCopy:
    """The weights in the base model's dtype, as of a version."""

    flat: torch.Tensor
    views: Mapping[str, Pair]
    version: int


@dataclass
class Adapter:
    """One run's adapter on the device. All arenas are fp32 (fp64 under an fp64 base)."""

    spec: AdapterSpec
    layout: Layout
    weights: torch.Tensor
    gradient: Gradient
    m: torch.Tensor
    v: torch.Tensor
    step: int
    grads_pending: bool
    compute_dtype: torch.dtype
    gradient_in_use: bool = field(init=False, default=False)  # an op is adding to it right now
    version: int = field(init=False, default=0)  # of `weights`: whoever holds a copy compares it
    _compute: ComputeCopy | None = field(init=False, default=None)

    @property
    def compute(self) -> Mapping[str, Pair]:
        """Return the matrices in the base model's dtype, copied on first use of a version."""
        if self._compute is None:
            # The same tensor if of that dtype.
            flat = self.weights.to(self.compute_dtype)
            self._compute = ComputeCopy(flat, self.layout.views(flat), self.version)
        elif self._compute.version != self.version:
            if self._compute.flat is not self.weights:
                self._compute.flat.copy_(self.weights)
            self._compute.version = self.version
        return self._compute.views

    def weights_changed(self) -> None:
        """Make every copy of the weights stale; call after every write to `weights`."""
        self.version += 1

    def scratch_gradient(self) -> Gradient:
        """Return a zeroed gradient arena of this adapter's layout."""
        flat = torch.zeros_like(self.weights)
        return Gradient(flat, self.layout.views(flat))


class AdapterBank:
    """The adapters of every run this engine holds."""

    def __init__(
        self, targets: Sequence[Target], device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        self._targets = targets
        self._device = device
        self._compute_dtype = compute_dtype
        self._arena_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        self._adapter_by_run: dict[str, Adapter] = {}
        self._layout_by_shape: dict[tuple[int, bool, bool, bool], Layout] = {}

    def __contains__(self, run: object) -> bool:
        return run in self._adapter_by_run

    def __getitem__(self, run: str) -> Adapter:
        return self._adapter_by_run[run]

    def create(self, run: str, spec: AdapterSpec) -> Adapter:
        """Add a fresh adapter: A random from the spec's seed, B zero, so that it starts as the base."""
        layout = self.layout_of(spec)
        weights = initial_weights(spec, layout).to(self._arena_dtype)
        zeros = torch.zeros_like(weights)
        state = AdapterState(spec, weights, zeros, zeros, zeros, step=0, grads_pending=False)
        return self.restore(run, state)

    def drop(self, run: str) -> None:
        """Forget a run's adapter; twice is harmless."""
        self._adapter_by_run.pop(run, None)

    def state(self, run: str) -> AdapterState:
        """Copy a run's adapter to the host."""
        held = self._adapter_by_run[run]
        return AdapterState(
            spec=held.spec,
            weights=host_copy(held.weights),
            grads=host_copy(held.gradient.flat),
            m=host_copy(held.m),
            v=host_copy(held.v),
            step=held.step,
            grads_pending=held.grads_pending,
        )

    def restore(self, run: str, state: AdapterState) -> Adapter:
        """Put a state, copied, in place of whatever this run held.

        Raises ValueError if the state was made for other modules than this base model has.
        """
        layout = self.layout_of(state.spec)
        if state.weights.shape != (layout.size,):
            raise ValueError(f"The state holds {state.weights.numel()} values, not {layout.size}.")
        weights, grads, m, v = (
            arena.to(self._device, self._arena_dtype, copy=True)
            for arena in (state.weights, state.grads, state.m, state.v)
        )
        gradient = Gradient(grads, layout.views(grads))
        adapter = Adapter(
            state.spec,
            layout,
            weights,
            gradient,
            m,
            v,
            state.step,
            state.grads_pending,
            self._compute_dtype,
        )
        self._adapter_by_run[run] = adapter
        return adapter

    def layout_of(self, spec: AdapterSpec) -> Layout:
        """Return where the matrices of such an adapter lie in its arenas."""
        shape = (spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed)
        if shape not in self._layout_by_shape:
            self._layout_by_shape[shape] = plan_layout(spec, self._targets)
        return self._layout_by_shape[shape]


def host_copy(arena: torch.Tensor) -> torch.Tensor:
    """Copy an arena to the host. Waits for the device."""
    return arena.to("cpu", copy=True)


def initial_weights(spec: AdapterSpec, layout: Layout) -> torch.Tensor:
    """Return a fresh weight arena, fp32 `[layout.size]` on the host.

    A is Kaiming-uniform with `a = sqrt(5)`, as PEFT has it: uniform in +-1/sqrt(inputs). Each module draws
    from its own generator, so its A depends on the seed, its name and the rank, and on no other module.
    """
    arena = torch.zeros(layout.size)
    views = layout.views(arena)
    for target in layout.targets:
        bound = 1.0 / math.sqrt(target.inputs)
        generator = torch.Generator().manual_seed(module_seed(spec.seed, target.name))
        views[target.name].a.uniform_(-bound, bound, generator=generator)
    return arena


def module_seed(seed: int, module: str) -> int:
    """Mix a run's seed with a module's name into 63 bits."""
    digest = hashlib.sha256(f"{seed}:{module}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
