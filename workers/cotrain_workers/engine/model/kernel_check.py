"""Comparison of a kernel with the function that it replaces, before it is used."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cotrain_workers.engine.device import check_device

Pure = Callable[..., Any]

#: Relative to the largest value. A kernel that keeps fp32 between two operations where eager mode rounds to 16 bits
#: differs by one rounding, and by another one in the backward of a product.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

log = logging.getLogger(__name__)


def agrees(what: str, device: torch.device, tolerance: float, measure: Callable[[], float]) -> bool:
    """Return True if a measured difference is within the tolerance; log a failure or a mismatch. Raises DeviceLost."""
    try:
        found = measure()
    except Exception:  # compilers raise exceptions of any type
        check_device(device)
        log.exception("%s cannot run here and is not used", what)
        return False
    if not found <= tolerance:
        log.error("%s is off by %.3g and is not used", what, found)
    return found <= tolerance


def is_right(kernel: Pure, function: Pure, tensors: int, examples: Sequence[Any]) -> bool:
    """Return True if a kernel matches its function, forward and backward for the first `tensors` arguments.

    It is also compared without gradients, as used by the decoder. A failure or a mismatch is logged.
    Raises DeviceLost.
    """
    inputs, rest = examples[:tensors], examples[tensors:]

    def measure() -> float:
        found = 0.0
        if inputs:
            found = difference(
                lambda *args: kernel(*args, *rest), lambda *args: function(*args, *rest), *inputs
            )
        with torch.inference_mode():
            return max(found, apart(outs_of(kernel, examples), outs_of(function, examples)))

    first = examples[0]
    return agrees(
        f"The kernel of {function.__name__}", first.device, TOLERANCE[first.dtype], measure
    )


def difference(ours: Pure, theirs: Pure, *inputs: torch.Tensor) -> float:
    """Return the largest relative difference of two functions of tensors, and of their gradients."""
    return apart(*(outs_and_gradients(function, inputs) for function in (ours, theirs)))


def apart(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of tensors, relative to the largest value."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(ours, theirs, strict=True)
    )


def outs_of(function: Pure, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a function as a tuple."""
    outs = function(*args)
    return outs if isinstance(outs, tuple) else (outs,)


def outs_and_gradients(function: Pure, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of a function and its gradients for varying output gradients."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        outs = outs_of(function, leaves)
        slopes = [torch.linspace(-1, 1, out.numel(), device=out.device) for out in outs]
        shaped = [s.view(out.shape).to(out.dtype) for s, out in zip(slopes, outs, strict=True)]
        grads = torch.autograd.grad(outs, leaves, shaped)
    return [*(out.detach() for out in outs), *grads]


def example(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return random values with the device and dtype of `like`, without changing a global generator."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
