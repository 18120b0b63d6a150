"""What a decoder step puts in place of the training route: rows of many adapters and many sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional

if TYPE_CHECKING:
    import torch

    from cotrain_workers.engine.model.attention import Rule


class Attention(Protocol):
    """Writes the keys and values of a step and attends."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape, each row within its own sequence."""


class Lora(Protocol):
    """Knows the adapter of each row."""

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place."""


class MixedStep:
    """A `StepRoute` of two independent parts."""

    def __init__(self, attention: Attention, lora: Lora) -> None:
        self._attention = attention
        self._lora = lora

    def linear(
        self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`, each row with its own adapter."""
        y = functional.linear(x, weight, bias)
        self._lora.add(module, x[0], y[0])
        return y

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape, each row within its own sequence."""
        return self._attention.attend(layer, q, k, v, rule)
