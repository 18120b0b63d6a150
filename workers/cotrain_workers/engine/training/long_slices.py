"""A datum longer than a micro-batch, computed layer by layer with a yield point after each layer.

Each layer is one piece of work with an autograd graph of its own, so other work can run between two of them: decoder
steps, and whole cycles. The inputs of all layers stay in memory until their backward, if necessary in that of the host.
The bits are those of one backward through the whole model: each gradient of a hidden state has the same two summands.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cotrain_workers.engine.adapters.copies import Arrival, CopyStream, HostArenas, carry_in, carry_out
from cotrain_workers.engine.coordination import Forward, Yielding
from cotrain_workers.engine.model.base_model import BaseModel, TokenRow, hidden_states
from cotrain_workers.engine.routing import Route
from cotrain_workers.engine.training.heads import HeadResult

#: Return the result of the head on a route, and the gradient `[T, d]` of the hidden states `[T, d]` that it is given.
HeadWork = Callable[[Route, torch.Tensor], Yielding[tuple[HeadResult, torch.Tensor]]]
#: Suspended long data of a worker. Each holds the inputs of all its layers, which no memory model counts.
MAX_SUSPENDED = 2
#: A suspended datum that ran within this time is expected to end, and others wait for its place.
RECENT_S = 60.0


class HostInputs:
    """Inputs of layers in host memory, taken in reverse order.

    While a layer runs backward, the input before its own is copied back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = CopyStream(device)
        self._stored: list[tuple[HostArenas, torch.Size, bool]] = []
        self._fetched: tuple[torch.Tensor, Arrival] | None = None

    def append(self, x: torch.Tensor) -> None:
        """Copy the input of the next layer to the host."""
        arena = x.detach().reshape(-1)
        self._stored.append((carry_out(self._stream, {"x": arena}), x.shape, x.requires_grad))

    def pop(self) -> torch.Tensor:
        """Return the newest input and forget it; start to copy the one before."""
        x, arrival = self._fetched or self._fetch()
        self._fetched = self._fetch() if self._stored else None
        arrival.wait()
        return x

    def _fetch(self) -> tuple[torch.Tensor, Arrival]:
        on_host, shape, needs_grad = self._stored.pop()
        arenas, arrival = carry_in(self._stream, on_host, self._device)
        return arenas["x"].view(shape).requires_grad_(needs_grad), arrival


@dataclass(eq=False)
class LongSlice:
    """The computation of one long datum, which may be suspended between two layers.

    It does not refer to the generator of `run`, so both are freed as soon as their pass is dropped.
    """

    base: BaseModel
    row: TokenRow
    kind: Forward
    tokens: int
    route: Route  # replaced by each cycle that continues: its adapter may have moved in memory
    head: HeadWork
    done: int = 0  # layers that ran, forward or backward, and the head
    may_stop: bool = True  # False inside the head, which holds matrices of the current route
    ran_at: float = field(default_factory=time.monotonic)
    keeps_graphs: bool = field(init=False)
    inputs: list[torch.Tensor] | HostInputs = field(default_factory=list[torch.Tensor])
    _outputs: list[torch.Tensor | None] = field(default_factory=list)  # None: to be recomputed

    def __post_init__(self) -> None:
        self.keeps_graphs = self.kind is Forward.BACKWARD

    @property
    def done_tokens(self) -> int:
        """Return the part of the datum that ran, as a number of tokens below its length."""
        layers = len(self.base.backbone.layers)  # type: ignore[arg-type]
        total = (2 if self.kind.goes_back else 1) * layers + 1
        return min(self.tokens - 1, self.tokens * self.done // total)

    def save_memory(self) -> None:
        """Recompute all layers, with their inputs on the host. Call this before it runs."""
        self.keeps_graphs = False
        self.inputs = HostInputs(self.base.head_weight.device)

    def suspend(self) -> None:
        """Drop what belongs to the current route: kept layers are computed again in their backward."""
        self.keeps_graphs = False
        self.ran_at = time.monotonic()
        self._outputs = [None] * len(self._outputs)

    def run(self) -> Yielding[HeadResult]:
        """Compute the datum and add its gradient to that of the route; yield after each layer and part of the head."""
        with torch.no_grad(), self.base.router.use(self.route):
            calls = self.base.recompute.record(lambda: hidden_states(self.base, self.row))
        hidden = calls[0].hidden
        for number, call in enumerate(calls):
            x = hidden.detach()
            if self.kind.goes_back:
                # As in one graph over all layers, where the embedding needs no gradient.
                x.requires_grad_(number > 0)
                self.inputs.append(x)
            keeps = self.kind.goes_back and self.keeps_graphs
            with self.base.router.use(self.route), torch.set_grad_enabled(keeps):
                output = call.forward(x)
            hidden = output.detach()
            if self.kind.goes_back:
                self._outputs.append(output if keeps else None)
            self.done += 1
            yield
        top = hidden.requires_grad_(self.kind.goes_back)
        with torch.set_grad_enabled(self.kind.goes_back), self.base.router.use(self.route):
            last = self.base.recompute.bypass(top, lambda: hidden_states(self.base, self.row))
        self.may_stop = False
        result, hidden_grad = yield from self.head(self.route, last.detach()[0])
        self.may_stop = True
        self.done += 1
        if not self.kind.goes_back:
            return result
        last.backward(hidden_grad[None])
        grad = top.grad
        del last, top, hidden
        yield
        for call in reversed(calls):
            x, kept = self.inputs.pop(), self._outputs.pop()
            with self.base.router.use(self.route):
                if kept is None:
                    with torch.enable_grad():
                        kept = call.forward(x)
                if kept.requires_grad:
                    kept.backward(grad)
            grad = x.grad
            self.done += 1
            yield
        return result


@dataclass(frozen=True)
class StartedLong:
    """Long datum of which a part has run."""

    slice: LongSlice
    work: Yielding[HeadResult]  # remaining computation, of `slice.run`
    gradient_before: torch.Tensor | None  # copy from before it, if other slices of its pass have run before
