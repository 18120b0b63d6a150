"""Activation checkpointing: decoder layers either keep the tensors for backward or recompute them.

The second forward repeats the first one on the same inputs and under the same route, so no bit of a
gradient depends on the choice. It trades time for memory, and may differ between micro-batches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Choice = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class LayerCall:
    """One call of a decoder layer: its input `[1, T, d]`, and the layer as a function of the input."""

    hidden: torch.Tensor
    forward: Callable[[torch.Tensor], torch.Tensor]


class Recompute:
    """Recompute switch of the decoder layers of one base model."""

    def __init__(self, *, in_tuple: bool = False) -> None:
        self.is_on = False
        self._in_tuple = in_tuple  # a layer returns its hidden states in a tuple
        self._instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None

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

    def _replace_layers(self, run: Callable[[], Any], instead: Any) -> Any:
        self._instead = instead
        try:
            return run()
        finally:
            self._instead = None

    def attach(self, layers: Iterable[nn.Module]) -> None:
        """Replace the `forward` of every layer by one that checks this switch."""
        for layer in layers:
            layer.forward = self.asking(layer.forward)

    def asking(self, forward: Any) -> Any:
        """Return a layer's `forward` that checks this switch at each call with gradients."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._instead is not None:
                return self._instead(forward, args, kwargs)
            if not (self.is_on and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            # Not reentrant: the LoRA matrices are not autograd leaves and the input of the first layer
            # requires no gradient, so a reentrant checkpoint would silently skip that layer. Layers use no
            # random numbers, so there is no RNG state to restore.
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run
