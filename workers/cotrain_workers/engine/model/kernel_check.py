"""Whether a kernel does what the function does that it replaces: it is compared before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cotrain_workers.engine.device import check_device

Pure = Callable[..., Any]

#: Over the largest value. A kernel that keeps fp32 between two operations where eager rounds to 16 bits
#: differs by a rounding, and by one more in the backward of a product.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

log = logging.getLogger(__name__)


def is_right(kernel: Pure, function: Pure, tensors: int, examples: Sequence[Any]) -> bool:
    """Compare a kernel with its function, forward and backward by the first `tensors` arguments, then without
    gradients, as the decoder calls it; if it fails or differs, the log says so. Raises DeviceLost.
    """
    inputs, rest = examples[:tensors], examples[tensors:]
    found = 0.0
    try:
        if inputs:
            found = difference(
                lambda *args: kernel(*args, *rest), lambda *args: function(*args, *rest), *inputs
            )
        with torch.inference_mode():
            found = max(found, apart(outs_of(kernel, examples), outs_of(function, examples)))
    except Exception:  # a compiler's, of any type
        check_device(examples[0].device)
        log.exception("The kernel of %s is not used", function.__name__)
        return False
    is_close = found <= TOLERANCE[examples[0].dtype]
    if not is_close:
        log.error("The kernel of %s is not used: it would be off by %.3g", function.__name__, found)
    return is_close


def difference(ours: Pure, theirs: Pure, *inputs: torch.Tensor) -> float:
    """Return how far two functions of tensors lie apart, and their gradients: the largest difference
    over the largest value.
    """
    return apart(*(outs_and_gradients(function, inputs) for function in (ours, theirs)))


def apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return how far tensors lie apart: the largest difference over the largest value."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )


def outs_of(function: Pure, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return what a function gives."""
    outs = function(*args)
    return outs if isinstance(outs, tuple) else (outs,)


def outs_and_gradients(function: Pure, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a function gives, and its gradients for a slope that is not the same everywhere."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        outs = outs_of(function, leaves)
        slopes = [torch.linspace(-1, 1, out.numel(), device=out.device) for out in outs]
        shaped = [s.view(out.shape).to(out.dtype) for s, out in zip(slopes, outs, strict=True)]
        grads = torch.autograd.grad(outs, leaves, shaped)
    return [*(out.detach() for out in outs), *grads]


def example(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random values of the device and type of `like`; no generator of torch's moves on."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
