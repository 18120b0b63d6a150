"""Quantized weights of a frozen base model, which are dequantized for each product.

The weight of every linear module that carries LoRA is quantized at load, except the unembedding. A product uses the
dequantized weight in the base model's type, so it has the bits of a base model with the dequantized weights. The
backward dequantizes again, so dequantized weights exist only during a product: one, or those of the modules that read
the same `x` in the backend `fused`.

* `int8`, `fp8`: 8 bits per value, and one fp32 scale per output channel.
* `nf4`: 4 bits per value, and one fp32 scale per 64 adjacent values. Its 16 levels are the quantiles of a normal
  distribution (Dettmers et al., QLoRA, 2023, appendix E).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

Quantization = Literal["none", "int8", "fp8", "nf4"]

BLOCK = 64  # values with a common scale in nf4
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_ROWS = 1024


class QuantizedWeight(nn.Module):
    """A matrix `[out, in]` in fewer bits. `dense` returns its values."""

    def __init__(self, weight: torch.Tensor, kind: Quantization) -> None:
        super().__init__()
        self.kind = kind
        self.shape, self.dtype = weight.shape, weight.dtype
        to_codes = _nf4 if kind == "nf4" else _per_channel
        codes, scales = to_codes(weight.detach(), kind)
        self.codes = nn.Buffer(codes)
        self.scales = nn.Buffer(scales)
        if kind == "nf4":
            self.levels = nn.Buffer(torch.tensor(LEVELS, device=codes.device))

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def is_cuda(self) -> bool:
        """True on a CUDA device."""
        return self.codes.is_cuda

    def dense(self) -> torch.Tensor:
        """Return a new matrix `[out, in]` of the base model's type."""
        if self.kind != "nf4":
            # One kernel computes in fp32 and rounds. Codes of fp8, all exact in bf16, have no common type with their scales.
            codes = self.codes if self.kind == "int8" else self.codes.bfloat16()
            return torch.mul(codes, self.scales, out=torch.empty(self.shape, dtype=self.dtype, device=self.device))
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(-1, BLOCK)
        values = self.levels[codes.int()] * self.scales
        return values.flatten()[: self.shape.numel()].view(self.shape).to(self.dtype)


FrozenWeight = torch.Tensor | QuantizedWeight


def dense(weight: FrozenWeight) -> torch.Tensor:
    """Return a frozen weight as a tensor."""
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def keep_weight(ctx: Any, weight: FrozenWeight, *others: torch.Tensor | None) -> None:
    """Save a weight and other tensors for a backward, as `keep_weights` does."""
    keep_weights(ctx, [weight], *others)


def kept_weight(ctx: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the weight, dequantized, and the other tensors of `keep_weight`."""
    (weight,), others = kept_weights(ctx)
    return dense(weight), others


def keep_weights(ctx: Any, weights: Sequence[FrozenWeight], *others: torch.Tensor | None) -> None:
    """Save weights and other tensors for a backward, and quantized weights without their dense values."""
    ctx.quantized = [each if isinstance(each, QuantizedWeight) else None for each in weights]
    plain = [None if isinstance(each, QuantizedWeight) else each for each in weights]
    ctx.save_for_backward(*plain, *others)


def kept_weights(ctx: Any) -> tuple[list[FrozenWeight], list[torch.Tensor]]:
    """Return the weights, not dequantized, and the other tensors of `keep_weights`."""
    saved, count = list(ctx.saved_tensors), len(ctx.quantized)
    return [plain if kept is None else kept for plain, kept in zip(saved, ctx.quantized, strict=False)], saved[count:]


class FrozenLinear(torch.autograd.Function):
    """`y = x W^T + b` of a quantized weight, without LoRA."""

    @staticmethod
    def forward(  # type: ignore[explicit-override]
        ctx: Any, x: torch.Tensor, weight: FrozenWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `y` `[1, T, out]`."""
        keep_weight(ctx, weight)
        return functional.linear(x, dense(weight), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        return torch.mm(grads[0][0], kept_weight(ctx)[0])[None], None, None


def frozen_linear(x: torch.Tensor, weight: FrozenWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Map `x` `[1, T, in]` to `[1, T, out]` without LoRA."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight, bias)
    y: torch.Tensor = FrozenLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch gives it no types
    return y


class QuantizedLinear(nn.Module):
    """A frozen linear module with a quantized weight."""

    def __init__(self, linear: nn.Linear, kind: Quantization) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = QuantizedWeight(linear.weight, kind)
        self.bias = linear.bias

    # typing.override requires Python 3.12
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[explicit-override]
        """Map `x` `[…, in]` to `[…, out]`."""
        return functional.linear(x, self.weight.dense(), self.bias)


def quantize(network: nn.Module, names: Iterable[str], kind: Quantization) -> None:
    """Replace linear modules of a model, by name, by quantized ones."""
    for name in names:
        linear: Any = network.get_submodule(name)
        network.set_submodule(name, QuantizedLinear(linear, kind))


def number_of_parameters(network: Any) -> int:
    """Return the number of values of a model, quantized ones included."""
    quantized = (each for each in network.modules() if isinstance(each, QuantizedWeight))
    return int(network.num_parameters()) + sum(each.shape.numel() for each in quantized)


def _per_channel(weight: torch.Tensor, kind: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes `[out, in]` and scales `[out, 1]`."""
    largest = _LARGEST[kind]
    scales = weight.abs().amax(dim=1, keepdim=True).float() / largest
    scales = torch.where(scales > 0, scales, 1.0)
    codes = torch.empty_like(weight, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    for at in range(0, len(weight), _ROWS):  # a fp32 copy of all rows may not fit
        own = slice(at, at + _ROWS)
        scaled = weight[own].float() / scales[own]
        codes[own] = (scaled.round() if kind == "int8" else scaled).clamp_(-largest, largest)
    return codes, scales


def _nf4(weight: torch.Tensor, _kind: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of codes `[blocks, BLOCK / 2]` and scales `[blocks, 1]`; the last block is filled with zeros."""
    flat = weight.flatten()
    blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).float()
    scales = torch.where(scales > 0, scales, 1.0)
    levels = torch.tensor(LEVELS, device=weight.device)
    bounds = (levels[1:] + levels[:-1]) / 2
    pairs = [
        codes[:, ::2] | codes[:, 1::2] << 4
        for own, scale in zip(blocks.split(_ROWS), scales.split(_ROWS), strict=True)
        for codes in [torch.bucketize(own.float() / scale, bounds).to(torch.uint8)]
    ]
    return torch.cat(pairs), scales
