"""Compile a small pure function for CUDA, and believe it only after a comparison with the function."""

from __future__ import annotations

import logging
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Pure = Callable[..., Any]

#: Over the largest value. A kernel that keeps fp32 between two operations where eager rounds to 16 bits
#: differs by a rounding, and by one more in the backward of a product.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

log = logging.getLogger(__name__)


def compiled(
    function: Pure, dims: Sequence[int], examples: Sequence[Any], *, gradients: int
) -> Pure | None:
    """Compile a function of tensors for any size in dimension `dims[i]` of its i-th, else of the sizes of
    `examples`; None if torch cannot, or what it makes is off. The first `gradients` get gradients, as in
    training: for others the compiler would make, and this check, a kernel that is never used.
    """
    options = reproducible_options()
    if options is None:
        log.error(
            "Nothing is fused: this torch chooses kernels by measuring, so bits would change."
        )
        return None
    kernel = kernel_of(function, options, variant(dims, examples))

    def run(*args: Any) -> Any:
        for tensor, dim in zip(args, dims, strict=False):
            torch._dynamo.mark_dynamic(tensor, dim)
        return kernel(*args)

    return run if is_right(run, function, gradients, examples) else None


def is_right(kernel: Pure, function: Pure, tensors: int, examples: Sequence[Any]) -> bool:
    """Compare a kernel with its function, forward and backward by the first `tensors` arguments, then as the
    decoder calls it: the compiler makes a kernel of its own for that, which is there from then on.
    """
    inputs, rest = examples[:tensors], examples[tensors:]
    try:
        found = difference(
            lambda *args: kernel(*args, *rest), lambda *args: function(*args, *rest), *inputs
        )
        with torch.inference_mode():
            found = max(found, apart(outs_of(kernel, examples), outs_of(function, examples)))
    except Exception:  # whatever the compiler does not like
        log.exception("%s is not fused", function.__name__)
        return False
    is_close = found <= TOLERANCE[inputs[0].dtype]
    if not is_close:
        log.error("%s is not fused: it would be off by %.3g", function.__name__, found)
    return is_close


def variant(dims: Sequence[int], examples: Sequence[Any]) -> str:
    """Name what a kernel is compiled for: the types and the sizes that are not free."""
    names = []
    for tensor, free in zip(examples, dims, strict=False):
        sizes = ["T" if at == free else str(size) for at, size in enumerate(tensor.shape)]
        names.append("_".join([str(tensor.dtype).removeprefix("torch."), *sizes]))
    return "__".join(names)


@cache
def kernel_of(function: Pure, options: tuple[str, ...], name: str) -> Pure:
    """Return a function compiled for one variant, for all modules that use it.

    Each variant has code of its own: the compiler keeps eight kernels per code at most and would then
    go on uncompiled, with other bits. Four are made: for inputs with a gradient, without, forward, and for the
    decoder, whatever the number of rows from two on.
    """
    code = function.__code__
    own = FunctionType(
        code.replace(co_name=f"{code.co_name}__{name}"), function.__globals__, function.__name__
    )
    return torch.compile(own, dynamic=False, options=dict.fromkeys(options, True))


@cache
def reproducible_options() -> tuple[str, ...] | None:
    """Return the options of the compiler under which two processes choose the same kernels; None if it
    has none.
    """
    known = set(torch._inductor.list_options())
    if "deterministic" not in known:
        return None
    # Round where the function rounds, as eager does; without it results are close and not the same.
    return ("deterministic", *({"emulate_precision_casts"} & known))


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
