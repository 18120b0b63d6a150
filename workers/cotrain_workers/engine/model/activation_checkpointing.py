"""Activation checkpointing: parts of the model keep their tensors for backward, or compute them again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cotrain_workers.engine.routing import Route, Router

RecomputePolicy = Literal["auto", "always", "never"]

#: Rows of a chunk. Each chunk reads the weights again, which takes 5 % of its time for an 8B model on an H200.
CHUNK_ROWS = 2048
#: Modules of a layer that compute each row alone, by their name in the models of transformers.
ROW_MODULES = ("mlp", "block_sparse_moe", "feed_forward")


@dataclass(frozen=True)
class LayerCall:
    """One call of a decoder layer: its input `[1, T, d]`, and the layer as a function of the input."""

    hidden: torch.Tensor
    forward: Callable[[torch.Tensor], torch.Tensor]


class Recompute:
    """Recompute switch of the decoder layers of one base model.

    The second forward repeats the first one on the same inputs and under the same route, so no bit of a gradient depends
    on the choice. It trades time for memory, and may differ between micro-batches. The switch also runs the model around
    its layers, for datums that are computed layer by layer (`long_slices.py`).
    """

    def __init__(self, *, in_tuple: bool = False) -> None:
        self.is_on = False
        self._in_tuple = in_tuple  # a layer returns its hidden states in a tuple
        self._replacement: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None
        """Function that runs in place of every layer, of its forward and arguments; None outside `record` and `bypass`."""

    def record(self, run: Callable[[], Any]) -> list[LayerCall]:
        """Run the model without its layers and return their calls, all with the input of the first layer."""
        calls: list[LayerCall] = []

        def note(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, *others = args
            calls.append(LayerCall(hidden, lambda x: self._hidden(forward(x, *others, **kwargs))))
            return self._output(hidden)

        self._replace_layers(run, note)
        return calls

    def bypass(self, hidden: torch.Tensor, run: Callable[[], Any]) -> Any:
        """Run the model with `hidden` `[1, T, d]` as the output of every layer."""
        return self._replace_layers(run, lambda forward, args, kwargs: self._output(hidden))

    def _hidden(self, output: Any) -> torch.Tensor:
        return output[0] if self._in_tuple else output  # type: ignore[no-any-return]

    def _output(self, hidden: torch.Tensor) -> Any:
        return (hidden, None) if self._in_tuple else hidden

    def _replace_layers(self, run: Callable[[], Any], replacement: Any) -> Any:
        self._replacement = replacement
        try:
            return run()
        finally:
            self._replacement = None

    def attach(self, layers: Iterable[nn.Module]) -> None:
        """Replace the `forward` of every layer by one that checks this switch."""
        for layer in layers:
            layer.forward = self.switched(layer.forward)

    def switched(self, forward: Any) -> Any:
        """Return a layer's `forward` that checks this switch at each call with gradients."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._replacement is not None:
                return self._replacement(forward, args, kwargs)
            if not (self.is_on and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            # Not reentrant: the LoRA matrices are not autograd leaves and the input of the first layer
            # requires no gradient, so a reentrant checkpoint would silently skip that layer. Layers use no
            # random numbers, so there is no RNG state to restore.
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run


def chunk_rows(layers: Iterable[nn.Module], router: Router) -> None:
    """Make the MLP of each layer compute in chunks of rows where the route has them.

    It serves datums whose MLP would not fit into memory as a whole. The inner values of an MLP take several times as much
    memory as its input, and each chunk computes them again in backward. A row has the same bits in every chunk of 32 rows or
    more. LoRA's gradients are sums over chunks instead of one sum over all rows, so their last bits differ from those
    of the whole MLP.
    """
    for layer in layers:
        for name in ROW_MODULES:
            module: Any = getattr(layer, name, None)
            if module is not None:
                module.forward = _in_chunks(router, module.forward)


def _in_chunks(router: Router, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return by_rows(router, x, lambda rows: forward(rows, *args, **kwargs))

    return run


def by_rows(router: Router, x: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return `function(x)` for `x` `[1, T, d]`, chunk by chunk if the route has chunks.

    Of a tuple, all values but the first become None. They are scores of a router, which nothing reads.
    """
    chunks = None if router.step is not None else router.route.chunks
    if chunks is None or x.dim() != 3 or x.shape[1] <= chunks.rows:
        return function(x)
    found = [
        _chunk(router, part_of(router.route, start, start + part.shape[1]), part, function)
        for start, part in zip(range(0, x.shape[1], chunks.rows), x.split(chunks.rows, dim=1), strict=True)
    ]
    if isinstance(found[0], torch.Tensor):
        return torch.cat(found, dim=1)
    return torch.cat([each[0] for each in found], dim=1), *[None] * (len(found[0]) - 1)


def _chunk(router: Router, route: Route, x: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> Any:
    def run(rows: torch.Tensor) -> Any:
        with router.use(route):
            return function(rows)

    if not torch.is_grad_enabled():
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def part_of(route: Route, start: int, stop: int) -> Route:
    """Return the route of rows `start` to `stop`, for modules that compute each row alone."""
    assert route.chunks is not None
    segments = [
        replace(each, start=max(each.start, start) - start, stop=min(each.stop, stop) - start)
        for each in route.segments
        if each.start < stop and each.stop > start
    ]
    experts = None if route.experts is None else route.experts[:, start:stop]
    lora = route.chunks.lora_of(segments, stop - start)
    return replace(route, segments=segments, lora=lora, experts=experts, chunks=None)
