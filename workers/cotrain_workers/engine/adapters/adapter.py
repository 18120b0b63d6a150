"""One run's adapter: its arenas, on the device or offloaded to the host, and the copy that the base model computes with."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.adapters.gradient import Gradient, discard_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_workers.engine.adapters.copy_streams import Arrival, HostArenas
    from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair

#: The arena of what a pass that may stay open has found of its gradient: it moves with the others, and is no
#: part of the run's state.
OPEN_GRADIENT = "open"
#: No two states of weights in this process have the same number, whatever is dropped and restored.
_VERSIONS = count()


def arena_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Return what weights, gradients and moments are kept in under a base model of `compute_dtype`."""
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


@dataclass
class ComputeCopy:
    """The weights in the base model's dtype, as of a version."""

    flat: torch.Tensor
    views: Mapping[str, Pair]
    version: int


@dataclass
class Adapter:
    """One run's adapter. All arenas are fp32 (fp64 under an fp64 base).

    They are on the device, or offloaded: then only the bank may touch them.
    """

    spec: AdapterSpec
    layout: Layout
    step: int
    grads_pending: bool
    compute_dtype: torch.dtype
    arenas: dict[str, torch.Tensor]  # on the device; empty while offloaded
    on_host: HostArenas | None = None
    arrival: Arrival | None = None  # of copies that the next computation must wait for
    gradient_in_use: bool = field(
        init=False, default=False
    )  # ops that run now have added to it, or do
    has_open_gradient: bool = False  # or will have one in the cycle that begins
    version: int = field(init=False)  # of `weights`: holders of a copy compare it
    _compute: ComputeCopy | None = field(init=False, default=None)
    _gradient: Gradient | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.weights_changed()

    @property
    def weights(self) -> torch.Tensor:
        """Return the arena of the weights, `[layout.size]`."""
        return self.arenas["weights"]

    @property
    def m(self) -> torch.Tensor:
        """Return the arena of Adam's first moments."""
        return self.arenas["m"]

    @property
    def v(self) -> torch.Tensor:
        """Return the arena of Adam's second moments."""
        return self.arenas["v"]

    @property
    def gradient(self) -> Gradient:
        """Return the gradient; there is none of a run at rest, so that zeros are made on first use."""
        if self._gradient is None:
            if "grads" not in self.arenas:
                self.arenas["grads"] = torch.zeros_like(self.weights)
            self._gradient = Gradient(self.arenas["grads"], self.layout)
        return self._gradient

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

    def hold_compute(self) -> None:
        """Let what is computed from here on begin after copies of the arenas that are under way."""
        if self.arrival is not None:
            self.arrival.hold_compute()
            self.arrival = None

    def weights_changed(self) -> None:
        """Make every copy of the weights stale; call after every write to `weights`."""
        self.version = next(_VERSIONS)

    def scratch_gradient(self) -> Gradient:
        """Return a zeroed gradient arena of this adapter's layout."""
        return Gradient(torch.zeros_like(self.weights), self.layout)

    def begin_open_gradient(self) -> Gradient:
        """Return a zeroed gradient arena for a pass that may stay open."""
        self.has_open_gradient = True
        self.arenas[OPEN_GRADIENT] = torch.zeros_like(self.weights)
        return self.open_gradient

    @property
    def open_gradient(self) -> Gradient:
        """Return the arena of the pass that is open; raises KeyError where none has begun to add to it."""
        return Gradient(self.arenas[OPEN_GRADIENT], self.layout)

    @property
    def has_begun_open_gradient(self) -> bool:
        """Return whether a pass that may stay open has added to its arena, and has not ended."""
        return OPEN_GRADIENT in self.arenas

    def drop_open_gradient(self) -> None:
        """Let go of it; twice is harmless. What is on the host of it does not come back."""
        self.has_open_gradient = False
        self.arenas.pop(OPEN_GRADIENT, None)

    def worth_copying(self) -> dict[str, torch.Tensor]:
        """Return the arenas of an adapter on the device; a gradient that is not pending counts as zeros."""
        assert self.on_host is None
        zeros = set() if self.grads_pending else {"grads"}
        return {name: arena for name, arena in self.arenas.items() if name not in zeros}

    def forget_arenas(self) -> None:
        """Let go of all device memory."""
        self.arenas = {}
        self._compute = self._gradient = None

    @property
    def device_bytes(self) -> int:
        """Return what it takes on the device while it trains: four arenas, five with an open pass, and the compute copy."""
        wide = arena_dtype(self.compute_dtype)
        narrow = 0 if self.compute_dtype == wide else self.compute_dtype.itemsize
        return self.layout.size * ((4 + self.has_open_gradient) * wide.itemsize + narrow)


def discard_gradients(adapters: Sequence[Adapter]) -> None:
    """Have the gradients count as zeros."""
    discard_all([adapter.gradient for adapter in adapters])
    for adapter in adapters:
        adapter.grads_pending = False
