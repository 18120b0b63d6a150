"""Roofline of a machine: its measured rates, and the minimum arithmetic of a cycle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.support.model import Shape
from bench.support.timing import timed

#: The fused AdamW reads weight, gradient and both moments in fp32, and writes all but the gradient.
ADAM_BYTES_PER_PARAMETER = 28
#: Weight, gradient and both moments in fp32; a 16-bit base adds a copy of the weights in its dtype.
ARENA_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Rates:
    """Measured rates of this machine."""

    matmul_flops: float  # per second, in the dtype of the base model
    copy_bytes: float  # read plus written, per second

    def fastest(self, other: Rates) -> Rates:
        """Return the larger of each, because other load only reduces a measurement."""
        return Rates(max(self.matmul_flops, other.matmul_flops), max(self.copy_bytes, other.copy_bytes))


def measure_rates(device: str, dtype: torch.dtype) -> Rates:
    """Return the rates of a large square matmul and a large copy, the best of ten each."""
    return Rates(matmul_flops(device, dtype), copy_bandwidth(device))


def matmul_flops(device: str, dtype: torch.dtype) -> float:
    size = 2048 if device == "cpu" else 8192
    left = torch.randn(size, size, device=device, dtype=dtype)
    return float(2 * size**3 / min(timed(lambda: left @ left, device) for _ in range(10)))


def copy_bandwidth(device: str) -> float:
    """Return bytes read and written per second by a large copy."""
    size = 2**28 if device == "cpu" else 2**31
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(timed(lambda: target.copy_(source), device) for _ in range(10))


def adapter_parameters(shape: Shape, rank: int, *, unembed: bool = True) -> int:
    """Return the number of trained values of an adapter on every linear module: `rank * sum(in + out)`."""
    pairs = shape.linears * shape.layers + [(shape.hidden, shape.vocab)] * unembed
    return rank * sum(inputs + outputs for inputs, outputs in pairs)


def adapter_bytes(shape: Shape, rank: int, dtype: torch.dtype) -> int:
    """Return the bytes of an adapter in training: fp32 arenas, and a copy in the dtype of a 16-bit base."""
    copy = dtype.itemsize if dtype.itemsize < 4 else 0
    return (ARENA_BYTES_PER_PARAMETER + copy) * adapter_parameters(shape, rank)


def flops_per_token(shape: Shape, length: int, rank: int, *, recompute: bool = False) -> float:
    """Return the FLOP of one token in a sequence of `length`, forward and backward, with a frozen base.

    * Linear modules: 2 per weight forward and 2 for the gradient of the input (a trained weight would need 2 more),
      and 2 again if the forward is repeated. The head's chunks are visited once: 4 per weight.
    * Causal attention: `2 S H D` per layer forward (scores and values, half of the square). Backward takes 2.5 times
      that, because it computes the scores again (Dao, FlashAttention-2, 2023, section 4.1).
    * LoRA: 6 per parameter, because its weights need gradients.
    """
    linear = shape.layers * sum(inputs * outputs for inputs, outputs in shape.linears)
    attention = 2.0 * length * shape.heads * shape.head * shape.layers
    visits = 3.0 if recompute else 2.0
    lora = 6.0 * adapter_parameters(shape, rank)
    head = 4.0 * shape.hidden * shape.vocab
    return 2.0 * visits * linear + head + (visits + 1.5) * attention + lora


def ceiling(shape: Shape, length: int, rank: int, rates: Rates, *, adapters: int, tokens: int) -> float:
    """Return the tokens/s of a cycle that only computes at the matmul rate and steps at the copy rate.

    Nothing is computed twice, and norms, activations and the traffic of LoRA are free.
    """
    compute_s = tokens * flops_per_token(shape, length, rank) / rates.matmul_flops
    stepped = adapters * adapter_parameters(shape, rank)
    return tokens / (compute_s + ADAM_BYTES_PER_PARAMETER * stepped / rates.copy_bytes)
