"""Norms, gates and rotary embeddings as one kernel each, on CUDA.

They are many small kernels in transformers: a fifth of a step of an 8B model, by bytes, and 38 of the 84
launches per layer of a decode step. Only these pure functions are compiled, never the model, so that nothing
else of it is traced. What is compiled is checked against what transformers computes before it is used.
"""

from __future__ import annotations

import logging
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Pure = Callable[..., Any]
    Compile = Callable[..., Pure | None]

ROPE = "apply_rotary_pos_emb"
ROWS = 64
"""Of the examples by which functions are recognised and kernels checked."""

log = logging.getLogger(__name__)


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


def fuse(backbone: Any, compiled: Compile) -> tuple[str, ...]:
    """Put compiled functions into a loaded model; return which.

    `compiled(function, dims, examples, gradients=…)` is that of `compile.py`. Where a model is not as this file
    knows it, it stays as it is, and the log says so.
    """
    layers = backbone.layers
    norms = [each for each in backbone.modules() if type(each).__name__.endswith("RMSNorm")]
    done = {
        "gate": [_fuse_gate(layer.mlp, compiled) for layer in layers],
        "norm": [_fuse_norm(norm, compiled) for norm in norms],
        "rope": [_fuse_rope(layer.self_attn, compiled) for layer in layers],
    }
    for name, each in done.items():
        if not all(each):
            log.warning("%s: %d of %d are not fused", name, each.count(False), len(each))
    return tuple(name for name, each in done.items() if any(each))


def _fuse_norm(norm: Any, compiled: Compile) -> bool:
    weight = norm.weight
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    x = example(norm.weight, ROWS, len(weight))
    pure = first_equal((norm_then_weight, norm_with_one), (x, weight, eps), norm(x))
    fused = pure and compiled(pure, (0,), (x, weight, eps), gradients=1)
    if not fused:
        return False

    def forward(x: torch.Tensor) -> Any:
        # Queries and keys differ in their number of heads alone, and share a kernel as rows.
        return fused(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)

    norm.forward = forward
    return True


def _fuse_gate(mlp: Any, compiled: Compile) -> bool:
    shape = (1, ROWS, mlp.down_proj.weight.shape[1])
    both = [example(mlp.down_proj.weight, *shape) for _ in range(2)]
    pure = first_equal((silu_gate, gelu_gate), both, mlp.act_fn(both[0]) * both[1])
    fused = pure and compiled(pure, (1, 1), both, gradients=2)
    if not fused:
        return False

    def forward(x: torch.Tensor) -> Any:
        return mlp.down_proj(fused(mlp.gate_proj(x), mlp.up_proj(x)))

    mlp.forward = forward
    return True


def _fuse_rope(attention: Any, compiled: Compile) -> bool:
    """Run this module's `forward` with another rotary embedding; other models keep theirs."""
    original = type(attention).forward
    eager = getattr(original, "__globals__", {}).get(ROPE)
    if eager is None or ROPE not in original.__code__.co_names:
        return False
    like, size = attention.o_proj.weight, attention.head_dim
    groups = attention.num_key_value_groups
    kv_heads = attention.o_proj.weight.shape[1] // size // groups
    heads = (kv_heads * groups, kv_heads)
    both = [example(like, 1, ROWS, count, size).transpose(1, 2) for count in heads]
    inputs = (*both, *(example(like, 1, ROWS, size) for _ in range(2)))
    pure = first_equal((rotate,), inputs, eager(*inputs))
    fused = pure and compiled(pure, (2, 2, 1, 1), inputs, gradients=2)
    if not fused:
        return False

    def turned(*args: Any, **kwargs: Any) -> Any:
        is_known = len(args) == 4 and not kwargs
        return fused(*args) if is_known else eager(*args, **kwargs)

    attention.forward = with_global(original, ROPE, turned).__get__(attention)
    return True


def with_global(function: Any, name: str, value: Any) -> Any:
    """Return a copy of a function that sees another value under one of its module's names."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def example(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random values of the device and type of `like`; no generator of torch's moves on."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)


def first_equal(candidates: Sequence[Pure], inputs: Sequence[Any], expected: Any) -> Pure | None:
    """Return the first candidate that gives what the model's own function gave, bit for bit."""
    wanted = expected if isinstance(expected, tuple) else (expected,)
    for pure in candidates:
        found = pure(*inputs)
        pairs = zip(found if isinstance(found, tuple) else (found,), wanted, strict=True)
        if all(torch.equal(*pair) for pair in pairs):
            return pure
    return None
