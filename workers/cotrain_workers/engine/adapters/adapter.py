"""Adapter of one run: its arenas on the device or the host, its compute copy, its gradient, its first weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from typing_extensions import override

from cotrain_workers.engine.adapters.copies import OPEN_GRADIENT, Arrival, HostArenas
from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Sums, seed_of

#: Number of random values between two yield points, which takes about 20 ms.
DRAWN_AT_ONCE = 1_000_000
#: Version numbers of weights, unique in this process across drops and restores.
_VERSIONS = count()


def arena_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of weights, gradients and moments for a base model of `compute_dtype`."""
    return torch.promote_types(compute_dtype, torch.float32)


class Gradient:
    """Gradient arena, and every module's matrices in it.

    Zeroing an arena writes all of it, which is expensive on a CPU. There the arena becomes stale instead. Products
    overwrite it, and only matrices without a product are zeroed when the whole arena is read.
    """

    def __init__(self, arena: torch.Tensor, layout: Layout) -> None:
        self._arena = arena
        self._views = {name: Sums(*pair) for name, pair in layout.views(arena).items()}
        self._may_be_stale = False
        self._norm: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The arena `[layout.size]`, to read or to write."""
        self._norm = None
        return self.settle()

    @property
    def views(self) -> dict[str, Sums]:
        """Matrices by module, to add to. Callers that do not use `kept_share` must call `settle` before."""
        self._norm = None
        return self._views

    def settle(self) -> torch.Tensor:
        """Write zeros over stale matrices; return the arena."""
        if self._may_be_stale:
            for sums in self._views.values():
                if sums.is_stale:
                    sums.a.zero_()
                    sums.b.zero_()
                    sums.is_stale = False
            self._may_be_stale = False
        return self._arena

    @property
    def is_cuda(self) -> bool:
        """True if it is on a GPU, where it is never stale."""
        return self._arena.is_cuda

    def discard(self) -> None:
        """Make the gradient count as zeros."""
        if self.is_cuda:
            self._arena.zero_()
            return
        self._norm = None
        self._may_be_stale = True
        for sums in self._views.values():
            sums.is_stale = True

    def discard_unless(self, keep: torch.Tensor) -> None:
        """Make the gradient count as zeros if the boolean `keep` is false; on CUDA without waiting for the host."""
        if self.is_cuda:
            self._arena.masked_fill_(~keep, 0.0)
        elif not keep:
            self.discard()

    def norm(self) -> torch.Tensor:
        """Return the L2 norm, added up in fp64, a scalar on the device.

        It is cached until the next access to the arena, which may write to it.
        """
        if self._norm is None:
            self._norm = torch.linalg.vector_norm(self.settle(), dtype=torch.float64)
        return self._norm

    def is_finite(self) -> torch.Tensor:
        """Return, by the norm, a boolean that is true if no value is NaN or infinite. Waits for the device."""
        found = self.norm().isfinite()
        # A sum of squares may overflow fp64 although all values are finite.
        return found if found else self.settle().isfinite().all()


@dataclass(frozen=True)
class Steepest:
    """Target of a pass with the steepest loss, for the error message of a failed step."""

    seq: int  # of the pass
    datum: int
    target: str  # its index, or indices
    slope: float  # of the loss, by the target's log-probability
    logprob: float
    recorded: float | None  # the log-probability in the request, if the loss has one

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
    """Weights in the base model's dtype, with their version."""

    flat: torch.Tensor
    views: Mapping[str, Pair]
    version: int


@dataclass
class Adapter:
    """One run's adapter. All arenas are fp32 (fp64 under an fp64 base).

    They are on the device or offloaded; offloaded ones are accessed only by the bank.
    """

    spec: AdapterSpec
    layout: Layout
    step: int
    grads_pending: bool
    compute_dtype: torch.dtype
    arenas: dict[str, torch.Tensor]  # on the device; empty while offloaded
    on_host: HostArenas | None = None
    arrival: Arrival | None = None  # of copies that the next computation must wait for
    gradient_in_use: bool = field(init=False, default=False)  # ops that run now have added to it, or do
    has_open_gradient: bool = False  # or will have one in the current cycle
    scale: float = field(init=False)  # factor on `B @ A`
    version: int = field(init=False)  # of `weights`; compared by holders of a copy
    steepest: Steepest | None = field(init=False, default=None)
    """Steepest target among the passes of the pending gradient, if its slope is suspiciously large."""
    _compute: ComputeCopy | None = field(init=False, default=None)
    _gradient: Gradient | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.scale = self.spec.scale
        self.weights_changed()

    @property
    def weights(self) -> torch.Tensor:
        """Arena of the weights, `[layout.size]`."""
        return self.arenas["weights"]

    @property
    def m(self) -> torch.Tensor:
        """Arena of Adam's first moments."""
        return self.arenas["m"]

    @property
    def v(self) -> torch.Tensor:
        """Arena of Adam's second moments."""
        return self.arenas["v"]

    @property
    def gradient(self) -> Gradient:
        """Gradient buffer; zeros are allocated on first use."""
        if self._gradient is None:
            if "grads" not in self.arenas:
                self.arenas["grads"] = torch.zeros_like(self.weights)
            self._gradient = Gradient(self.arenas["grads"], self.layout)
        return self._gradient

    @property
    def compute(self) -> Mapping[str, Pair]:
        """Matrices in the base model's dtype, copied on first use of a version."""
        if self._compute is None:
            # The same tensor if it has that dtype.
            flat = self.weights.to(self.compute_dtype)
            self._compute = ComputeCopy(flat, self.layout.views(flat), self.version)
        elif self._compute.version != self.version:
            if self._compute.flat is not self.weights:
                self._compute.flat.copy_(self.weights)
            self._compute.version = self.version
        return self._compute.views

    def await_copies(self) -> None:
        """Make later computation wait for pending copies of the arenas."""
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None

    def weights_changed(self) -> None:
        """Invalidate every copy of the weights. Call it after every write to `weights`."""
        self.version = next(_VERSIONS)

    def claim_gradient(self, *, may_stay_open: bool) -> Gradient:
        """Return the destination of a pass's gradient: the adapter's own arena while no other pass uses it, else
        scratch.

        A failed pass is undone by discarding the sums or dropping the scratch. Both start from zeros, so the bits
        of the sum do not depend on the choice. A pass that may stay open does not use the own arena: between cycles
        the adapter is then as its last complete op left it. A pass behind an open one does not use it either. The
        open pass ends first and is added to the arena as a whole.
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
        """Return, on the device, a boolean that is true if a gradient is finite.

        On a CPU the adapter's own gradient is read once for this and for the norm of the next step.
        """
        if claimed.is_cuda or claimed is not self.gradient:
            return is_all_finite(claimed.flat)
        return claimed.is_finite()

    def add(self, claimed: Gradient, is_finite: torch.Tensor) -> None:
        """Add the gradient of a complete pass if the boolean is true; otherwise discard it."""
        claimed.discard_unless(is_finite)
        if claimed is not self.gradient:
            self.gradient.flat.add_(claimed.flat)
            self.gradient_in_use = True  # until the host has read the verdict
            self._let_go(claimed)

    def take_back(self, claimed: Gradient) -> None:
        """Discard the gradient of an incomplete pass."""
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
        """Arena of the open pass; raises KeyError if none has started to add to it."""
        return Gradient(self.arenas[OPEN_GRADIENT], self.layout)

    def drop_open_gradient(self) -> None:
        """Drop the gradient of the open pass, if any. A copy on the host is not restored."""
        self.has_open_gradient = False
        self.arenas.pop(OPEN_GRADIENT, None)

    def worth_copying(self) -> dict[str, torch.Tensor]:
        """Return the arenas of an adapter on the device; a gradient that is not pending counts as zeros."""
        assert self.on_host is None
        zeros = set() if self.grads_pending else {"grads"}
        return {name: arena for name, arena in self.arenas.items() if name not in zeros}

    def forget_arenas(self) -> None:
        """Release all device memory."""
        self.arenas = {}
        self._compute = self._gradient = None


def discard_gradients(adapters: Sequence[Adapter]) -> None:
    """Make the adapters' gradients count as zeros."""
    discard_all([adapter.gradient for adapter in adapters])
    for adapter in adapters:
        adapter.grads_pending = False
        adapter.steepest = None


def discard_all(gradients: Sequence[Gradient]) -> None:
    """Make gradients count as zeros; on CUDA in one launch."""
    on_cuda = [gradient for gradient in gradients if gradient.is_cuda]
    if on_cuda:
        torch._foreach_zero_([gradient.flat for gradient in on_cuda])
    for gradient in gradients:
        if not gradient.is_cuda:
            gradient.discard()


def is_all_finite(values: torch.Tensor) -> torch.Tensor:
    """Return, on the device, a boolean that is true if no value is NaN or infinite. At least one value is required."""
    if not values.is_cuda:
        # This takes a third of the time for an arena. An infinite sum of finite values is inconclusive.
        has_finite_sum = torch.isfinite(values.sum())
        if has_finite_sum:
            return has_finite_sum
    low, high = values.aminmax()
    return torch.isfinite(low) & torch.isfinite(high)


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
