"""What the layers of transformers compute between their products, as pure functions: a layer is known by the one
that gives the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Pure = Callable[..., Any]


def norm_then_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of Llama, Mistral and Qwen: rounded, then scaled."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def norm_with_one(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of Gemma: scaled by one more than the weight, then rounded."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gated product of Llama, Mistral and Qwen."""
    return functional.silu(gate) * up


def gelu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gated product of Gemma."""
    return functional.gelu(gate, approximate="tanh") * up


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `q` and `k` `[1, heads, T, d]` turned by `cos` and `sin` `[1, T, d]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


def half_turned(x: torch.Tensor) -> torch.Tensor:
    """Return `(-b, a)` of the halves `(a, b)` of the last dimension."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def first_equal(candidates: Sequence[Pure], inputs: Sequence[Any], expected: Any) -> Pure | None:
    """Return the first candidate that gives what the model's own function gave, bit for bit."""
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for pure in candidates:
        found = pure(*inputs)
        pairs = zip(found if isinstance(found, tuple) else (found,), wanted, strict=True)
        if all(torch.equal(*pair) for pair in pairs):
            return pure
    return None
