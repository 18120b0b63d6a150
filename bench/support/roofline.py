"""What a machine could do at best: its measured rates, and the arithmetic that a cycle cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.support.model import Shape
from bench.support.timing import timed

#: The fused AdamW reads weight, gradient and both moments, and writes all but the gradient; fp32.
ADAM_BYTES_PER_PARAMETER = 28
#: Weight, gradient and both moments in fp32; a 16-bit base adds a copy of the weights in its dtype.
ARENA_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Rates:
    """What this machine was measured to do."""

    matmul_flops: float  # per second, in the dtype of the base model
    copy_bytes: float  # read plus written, per second

    def fastest(self, other: Rates) -> Rates:
        """Return the larger of each: whatever else runs only makes a measurement smaller."""
        return Rates(
            max(self.matmul_flops, other.matmul_flops), max(self.copy_bytes, other.copy_bytes)
        )


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """Time a large square matmul and a large copy, ten times each."""
    return Rates(matmul_flops(device, dtype), copy_bandwidth(device))


def matmul_flops(device: str, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large square matmul."""
    size = 2048 if device == "cpu" else 8192
    left = torch.randn(size, size, device=device, dtype=dtype)
    seconds = min(timed(lambda: left @ left, device) for _ in range(10))
    return float(2 * size**3 / seconds)


def copy_bandwidth(device: str) -> float:
    """Return bytes read and written per second by a large copy."""
    size = 2**28 if device == "cpu" else 2**31
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * size / seconds


def adapter_parameters(shape: Shape, rank: int, *, unembed: bool = True) -> int:
    """Return the trained values of an adapter on every linear module: `rank * sum(in + out)`."""
    pairs = shape.linears * shape.layers + [(shape.hidden, shape.vocab)] * unembed
    return rank * sum(inputs + outputs for inputs, outputs in pairs)


def flops_per_token(shape: Shape, length: int, rank: int, *, recompute: bool = False) -> float:
    """Count what one token of a sequence of `length` costs, forward and backward, under a frozen base.

    Per weight of a linear module 2 forward and 2 for the gradient of its input (a trained one would take
    2 more); 2 again where the forward is repeated. The head's chunks are visited once: 4 per weight.
    Causal attention: `2 S H D` per layer forward (scores and values, half of the square) and 2.5 times
    that in backward, which computes the scores again (Dao, FlashAttention-2, 2023, section 4.1).
    LoRA 6 per parameter: its weights want gradients.
    """
    linear = shape.layers * sum(inputs * outputs for inputs, outputs in shape.linears)
    attention = 2.0 * length * shape.heads * shape.head * shape.layers
    visits = 3.0 if recompute else 2.0
    lora = 6.0 * adapter_parameters(shape, rank)
    head = 4.0 * shape.hidden * shape.vocab
    return 2.0 * visits * linear + head + (visits + 1.5) * attention + lora


def ceiling(
    shape: Shape, length: int, rank: int, rates: Rates, *, adapters: int, tokens: int
) -> float:
    """Return the tokens/s of a cycle that only computes at the matmul rate and steps at the copy rate.

    Nothing is computed twice, and norms, activations and the traffic of LoRA cost nothing.
    """
    compute_s = tokens * flops_per_token(shape, length, rank) / rates.matmul_flops
    stepped = adapters * adapter_parameters(shape, rank)
    return tokens / (compute_s + ADAM_BYTES_PER_PARAMETER * stepped / rates.copy_bytes)


def adapter_bytes(shape: Shape, rank: int, dtype: torch.dtype) -> int:
    """Return what an adapter takes while it trains: fp32 arenas and a copy in a 16-bit base's dtype."""
    copy = dtype.itemsize if dtype.itemsize < 4 else 0
    return (ARENA_BYTES_PER_PARAMETER + copy) * adapter_parameters(shape, rank)
