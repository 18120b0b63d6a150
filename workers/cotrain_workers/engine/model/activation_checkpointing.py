"""Whether the decoder layers keep what backward needs, or compute it a second time.

The second forward is the first one again, on the same inputs and under the same route, so no bit of a
gradient depends on the choice: it is one of memory against time, and may be made for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Choice = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class LayerCall:
    """One call of a decoder layer: its input `[1, T, d]`, and the layer as a function of it."""

    hidden: torch.Tensor
    forward: Callable[[torch.Tensor], torch.Tensor]


class Recompute:
    """The switch of one base model's decoder layers."""

    def __init__(self) -> None:
        self.is_on = False
        self._instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None

    def record(self, run: Callable[[], Any]) -> list[LayerCall]:
        """Run the model without its layers, and return their calls; the input of all is that of the first."""
        calls: list[LayerCall] = []

        def note(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, *others = args
            calls.append(LayerCall(hidden, lambda x: forward(x, *others, **kwargs)))
            return hidden

        self._replace_layers(run, note)
        return calls

    def bypass(self, hidden: torch.Tensor, run: Callable[[], Any]) -> Any:
        """Run the model with `hidden` `[1, T, d]` as the output of each layer, so of the last."""
        return self._replace_layers(run, lambda forward, args, kwargs: hidden)

    def _replace_layers(self, run: Callable[[], Any], instead: Any) -> Any:
        self._instead = instead
        try:
            return run()
        finally:
            self._instead = None

    def attach(self, layers: Iterable[nn.Module]) -> None:
        """Let every layer ask this switch each time it is run with gradients."""
        for layer in layers:
            layer.forward = self.asking(layer.forward)

    def asking(self, forward: Any) -> Any:
        """Return a layer's `forward` that asks this switch."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._instead is not None:
                return self._instead(forward, args, kwargs)
            if not (self.is_on and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            # Not reentrant: the LoRA matrices are no autograd leaves and the input of the first layer
            # wants no gradient, so a reentrant checkpoint would pass that layer by in silence. Nothing
            # in a layer is random: no state of a generator has to come back.
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        return run
