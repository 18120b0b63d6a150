"""Whether the decoder layers keep what backward needs, or compute it a second time.

The second forward is the first one again, on the same inputs and under the same route, so no bit of a
gradient depends on the choice: it is one of memory against time, and may be made for each micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    Choice = Literal["auto", "always", "never"]


class Recompute:
    """The switch of one base model's decoder layers."""

    def __init__(self) -> None:
        self.is_on = False

    def attach(self, layers: Iterable[nn.Module]) -> None:
        """Let every layer ask this switch each time it is run with gradients."""
        for layer in layers:
            layer.forward = self.asking(layer.forward)

    def asking(self, forward: Any) -> Any:
        """Return a layer's `forward` that asks this switch."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not (self.is_on and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            # Not reentrant: the LoRA matrices are no autograd leaves and the input of the first layer
            # wants no gradient, so a reentrant checkpoint would pass that layer by in silence. Nothing
            # in a layer is random: no state of a generator has to come back.
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        return run
