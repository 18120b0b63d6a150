"""One run's adapter: its arenas, on the device or offloaded to the host, the copy that the base model computes with, and
where gradients are added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from typing_extensions import override

from cotrain_workers.engine.adapters.copy_streams import Arrival, HostArenas
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Sums

#: The arena of what a pass that may stay open has found of its gradient: it moves with the others, and is no
#: part of the run's state.
OPEN_GRADIENT = "open"
#: No two states of weights in this process have the same number, whatever is dropped and restored.
_VERSIONS = count()


def arena_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Return what weights, gradients and moments are kept in under a base model of `compute_dtype`."""
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


class Gradient:
    """A gradient arena and every module's matrices in it.

    To zero an arena is to write all of it. On a CPU, where that is dear, it becomes stale instead: products are
    written over it, and only what has none is zeroed, when the whole is asked for.
    """

    def __init__(self, arena: torch.Tensor, layout: Layout) -> None:
        self._arena = arena
        self._views = {name: Sums(*pair) for name, pair in layout.views(arena).items()}
        self._may_be_stale = False
        self._norm: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """Return the arena `[layout.size]`, to read or to write."""
        self._norm = None
        return self._settled()

    @property
    def views(self) -> dict[str, Sums]:
        """Return the matrices by module, to add to. Who does not ask for `kept_share` settles them before."""
        self._norm = None
        return self._views

    def settle(self) -> None:
        """Write zeros over what is stale."""
        self._settled()

    @property
    def is_cuda(self) -> bool:
        """Return whether it is on a GPU: there it is never stale."""
        return self._arena.is_cuda

    def discard(self) -> None:
        """Have it count as zeros."""
        if self.is_cuda:
            self._arena.zero_()
            return
        self._norm = None
        self._may_be_stale = True
        for sums in self._views.values():
            sums.is_stale = True

    def discard_unless(self, keep: torch.Tensor) -> None:
        """Have it count as zeros if the boolean `keep` is false; on CUDA without asking the host."""
        if self.is_cuda:
            self._arena.masked_fill_(~keep, 0.0)
        elif not keep:
            self.discard()

    def norm(self) -> torch.Tensor:
        """Return its L2 norm, added up in fp64, a scalar on the device.

        It is kept until someone asks for the arena, who may write to it.
        """
        if self._norm is None:
            self._norm = torch.linalg.vector_norm(self._settled(), dtype=torch.float64)
        return self._norm

    def is_finite(self) -> torch.Tensor:
        """Return whether there is no NaN and no infinity, by the norm. Waits for the device."""
        found = self.norm().isfinite()
        # Squares of fp64 may be too large where their roots are not.
        return found if found else self._settled().isfinite().all()

    def _settled(self) -> torch.Tensor:
        if self._may_be_stale:
            for sums in self._views.values():
                if sums.is_stale:
                    sums.a.zero_()
                    sums.b.zero_()
                    sums.is_stale = False
            self._may_be_stale = False
        return self._arena


@dataclass(frozen=True)
class Steepest:
    """The target of a pass with the steepest loss, for the message of a step that its gradient makes fail."""

    seq: int  # of the pass
    datum: int
    target: str  # its index, or indices
    slope: float  # of the loss, by the target's log-probability
    logprob: float
    recorded: float | None  # the log-probability that the request brought, if the loss has one

    @override
    def __str__(self) -> str:
        recorded = "" if self.recorded is None else f" (recorded: {self.recorded:.6g})"
        return (
            f"Steepest target of the passes behind it: data[{self.datum}].loss_fn_inputs.target_tokens[{self.target}]"
            f" of seq {self.seq}, where the loss has the slope {self.slope:.3g} by a log-probability of"
            f" {self.logprob:.6g}{recorded}."
        )


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
    scale: float = field(init=False)  # of what it adds
    version: int = field(init=False)  # of `weights`: holders of a copy compare it
    steepest: Steepest | None = field(init=False, default=None)
    """The target with the steepest loss among the passes of the pending gradient, if one is suspiciously steep."""
    _compute: ComputeCopy | None = field(init=False, default=None)
    _gradient: Gradient | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.scale = self.spec.scale
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

    def claim_gradient(self, *, may_stay_open: bool) -> Gradient:
        """Return where a pass may add its gradient: the adapter's own arena while no other does, else scratch.

        A pass that fails is then undone by discarding the sums or dropping the scratch. Both start from zeros,
        so the bits of the sum do not depend on which it was. One that may stay open leaves the arena alone:
        the adapter is then, between cycles, as its last complete op left it. One behind an open pass does, too:
        that pass, which ends first, is added to the arena whole.
        """
        if may_stay_open:
            self.has_open_gradient = True
            self.arenas[OPEN_GRADIENT] = torch.zeros_like(self.weights)
            return self.open_gradient
        if self.grads_pending or self.gradient_in_use or OPEN_GRADIENT in self.arenas:
            return Gradient(torch.zeros_like(self.weights), self.layout)
        self.gradient_in_use = True
        return self.gradient

    def is_finite(self, claimed: Gradient) -> torch.Tensor:
        """Return, on the device, whether a gradient is finite.

        On a CPU it is read once for this and the norm of a step that follows, if it is the adapter's own.
        """
        if claimed.is_cuda or claimed is not self.gradient:
            return is_all_finite(claimed.flat)
        return claimed.is_finite()

    def add(self, claimed: Gradient, is_finite: torch.Tensor) -> None:
        """Add what a complete pass has claimed and filled, if the boolean is true; else leave no trace of it."""
        claimed.discard_unless(is_finite)
        if claimed is not self.gradient:
            self.gradient.flat.add_(claimed.flat)
            self.gradient_in_use = True  # until the host knows whether anything was added
            self._let_go(claimed)

    def take_back(self, claimed: Gradient) -> None:
        """Leave no trace of what an incomplete pass has claimed and filled."""
        if claimed is self.gradient:
            claimed.discard()
            self.gradient_in_use = False
        else:
            self._let_go(claimed)

    def _let_go(self, claimed: Gradient) -> None:
        if claimed.flat is self.arenas.get(OPEN_GRADIENT):
            self.drop_open_gradient()

    @property
    def open_gradient(self) -> Gradient:
        """Return the arena of the pass that is open; raises KeyError where none has begun to add to it."""
        return Gradient(self.arenas[OPEN_GRADIENT], self.layout)

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


def discard_gradients(adapters: Sequence[Adapter]) -> None:
    """Have the gradients count as zeros."""
    discard_all([adapter.gradient for adapter in adapters])
    for adapter in adapters:
        adapter.grads_pending = False
        adapter.steepest = None


def discard_all(gradients: Sequence[Gradient]) -> None:
    """Have gradients count as zeros; on CUDA in one launch."""
    on_cuda = [gradient for gradient in gradients if gradient.is_cuda]
    if on_cuda:
        torch._foreach_zero_([gradient.flat for gradient in on_cuda])
    for gradient in gradients:
        if not gradient.is_cuda:
            gradient.discard()


def is_all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return, on the device, whether there is no NaN and no infinity; there is at least one value."""
    if not values.is_cuda:
        # A third of the time for an arena. Finite values may have a sum that is not: then it says nothing.
        has_finite_sum = torch.isfinite(values.sum())
        if has_finite_sum:
            return has_finite_sum
    low, high = values.aminmax()
    return torch.isfinite(low) & torch.isfinite(high)
