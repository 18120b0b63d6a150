# mypy: ignore-errors
"""Triton kernels of the softmax over a vocabulary; each program computes one row, or some columns of one.

Logits are fp32, before the cap. `CAPPED` applies the softmax to `cap * tanh(x / cap)`. `norms` `[rows, 2]`
contains the maximum of each row and the sum of all `exp(x - maximum)`. Kernels for some rows of a visit receive
the number of the `first` one. It is not specialised, because a variant might have other bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # finite, because a row may begin with -inf


@triton.jit
def squashed(x, cap):
    """Return `tanh(x / cap)`."""
    return 2.0 * tl.sigmoid(2.0 * x / cap) - 1.0


@triton.jit
def capped(x, cap, CAPPED: tl.constexpr):
    """Return the capped logits, or `x` without a cap."""
    if CAPPED:
        x = cap * squashed(x, cap)
    return x


@triton.jit
def softmax_norms(logits, norms, width, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Write maximum and exponential sum of a row in one pass."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < width
        x = capped(tl.load(logits + row * width + columns, mask=inside, other=0.0), cap, CAPPED)
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
    tl.store(norms + 2 * row, peak)
    tl.store(norms + 2 * row + 1, total)


@triton.jit(do_not_specialize=["first"])
def softmax_pick(
    logits, norms, targets, logprobs, first, width, count, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the log-probabilities of a row's `count` targets."""
    at = tl.program_id(0).to(tl.int64)
    row = first + at
    cells = at * count + tl.arange(0, BLOCK)
    known = tl.arange(0, BLOCK) < count
    target = tl.load(targets + cells, mask=known, other=0)
    x = capped(tl.load(logits + row * width + target, mask=known, other=0.0), cap, CAPPED)
    # The maximum is subtracted first: maximum + logarithm would be rounded like a large number.
    logprob = (x - tl.load(norms + 2 * row)) - tl.log(tl.load(norms + 2 * row + 1))
    tl.store(logprobs + cells, logprob, mask=known)


@triton.jit(do_not_specialize=["first"])
def softmax_backward(
    logits, norms, targets, slopes, grads, first, width, count, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write some columns of `d loss / d logits` of a row, given d loss / d logprob of its targets."""
    at = tl.program_id(0).to(tl.int64)
    row = first + at
    begin = tl.program_id(1) * BLOCK
    columns = begin + tl.arange(0, BLOCK)
    inside = columns < width
    cells = row * width + columns
    x = tl.load(logits + cells, mask=inside, other=float("-inf"))
    share = tl.exp(capped(x, cap, CAPPED) - tl.load(norms + 2 * row))
    share /= tl.load(norms + 2 * row + 1)
    factor = tl.full((), 0.0, tl.float32)
    own = tl.zeros((BLOCK,), tl.float32)
    for number in range(count):
        target = tl.load(targets + at * count + number)
        slope = tl.load(slopes + at * count + number)
        factor += slope
        if (target >= begin) & (target < begin + BLOCK):
            own += tl.where(columns == target, slope, 0.0)
    grad = own - factor * share
    if CAPPED:
        tanh = squashed(x, cap)
        grad *= 1.0 - tanh * tanh
    tl.store(grads + cells, grad.to(grads.dtype.element_ty), mask=inside)
