# mypy: ignore-errors
"""Triton kernels of norms, rotations and gates, and of the softmax over a vocabulary. Each value depends only on its own row.

`ONE` selects Gemma's norm, which is scaled by weight + 1 and rounded once. Other norms are rounded, then scaled.

Logits are fp32, before the cap. `CAPPED` applies the softmax to `cap * tanh(x / cap)`. `norms` `[rows, 2]`
contains the maximum of each row and the sum of all `exp(x - maximum)`. A kernel for some of the rows of `logits`
receives the number of the `first` one. Triton must not specialise it, because a variant might have other bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cotrain_workers.engine.lora.fused.parts import activated

LOWEST = tl.constexpr(-3.4e38)  # finite, because a row may begin with -inf


@triton.jit
def norm(x, weight, y, width, eps, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the norm of a row."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    cells = tl.program_id(0).to(tl.int64) * width + columns
    wide = tl.load(x + cells, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wide = wide * (1.0 / tl.sqrt(tl.sum(wide * wide) / width + eps))
    kind: tl.constexpr = y.dtype.element_ty
    wide = wide * (1.0 + scale) if ONE else wide.to(kind).to(tl.float32) * scale
    tl.store(y + cells, wide.to(kind), mask=inside)


@triton.jit
def norm_backward(
    x, weight, gy, kept, gx, width, eps, ONE: tl.constexpr, PLUS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradient of a row of `x` through its norm. With `PLUS`, add `kept`, the gradient of `x` itself."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    cells = tl.program_id(0).to(tl.int64) * width + columns
    wide = tl.load(x + cells, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(gy + cells, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = gx.dtype.element_ty
    slope = slope * (1.0 + scale) if ONE else (slope * scale).to(kind).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide) / width + eps)
    wide = wide * factor
    slope = (slope - wide * (tl.sum(slope * wide) / width)) * factor
    if PLUS:
        slope += tl.load(kept + cells, mask=inside, other=0.0).to(tl.float32)
    tl.store(gx + cells, slope.to(kind), mask=inside)


@triton.jit
def halves(x, cells, half, mask):
    """Return both halves of heads in fp32."""
    first = tl.load(x + cells, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(x + cells + half, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rotated(
    x, weight, cos, sin, y, heads, half, eps,
    NORM: tl.constexpr, ONE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write each head of a row, normalised with `NORM`, then rotated; a head consists of two halves."""
    row = tl.program_id(0).to(tl.int64)
    columns, numbers = tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    inside = columns < half
    mask = inside & (numbers < heads)
    cells = (row * heads + numbers) * 2 * half + columns
    a, b = halves(x, cells, half, mask)
    kind: tl.constexpr = y.dtype.element_ty
    if NORM:
        factor = 1.0 / tl.sqrt((tl.sum(a * a + b * b, 1) / (2 * half) + eps)[:, None])
        scale_a, scale_b = halves(weight, columns, half, inside)
        a, b = a * factor, b * factor
        a = a * (1.0 + scale_a) if ONE else a.to(kind).to(tl.float32) * scale_a
        b = b * (1.0 + scale_b) if ONE else b.to(kind).to(tl.float32) * scale_b
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    cos_a, cos_b = halves(cos, row * 2 * half + columns, half, inside)
    sin_a, sin_b = halves(sin, row * 2 * half + columns, half, inside)
    tl.store(y + cells, (a * cos_a - b * sin_a).to(kind), mask=mask)
    tl.store(y + cells + half, (b * cos_b + a * sin_b).to(kind), mask=mask)


@triton.jit
def rotated_backward(
    x, weight, cos, sin, gy, gx, heads, half, eps,
    NORM: tl.constexpr, ONE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a row of the input of `rotated`."""
    row = tl.program_id(0).to(tl.int64)
    columns, numbers = tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    inside = columns < half
    mask = inside & (numbers < heads)
    cells = (row * heads + numbers) * 2 * half + columns
    grad_a, grad_b = halves(gy, cells, half, mask)
    cos_a, cos_b = halves(cos, row * 2 * half + columns, half, inside)
    sin_a, sin_b = halves(sin, row * 2 * half + columns, half, inside)
    slope_a, slope_b = grad_a * cos_a + grad_b * sin_b, grad_b * cos_b - grad_a * sin_a
    if NORM:
        a, b = halves(x, cells, half, mask)
        factor = 1.0 / tl.sqrt((tl.sum(a * a + b * b, 1) / (2 * half) + eps)[:, None])
        a, b = a * factor, b * factor
        scale_a, scale_b = halves(weight, columns, half, inside)
        slope_a *= 1.0 + scale_a if ONE else scale_a
        slope_b *= 1.0 + scale_b if ONE else scale_b
        mean = (tl.sum(slope_a * a + slope_b * b, 1) / (2 * half))[:, None]
        slope_a, slope_b = (slope_a - a * mean) * factor, (slope_b - b * mean) * factor
    kind: tl.constexpr = gx.dtype.element_ty
    tl.store(gx + cells, slope_a.to(kind), mask=mask)
    tl.store(gx + cells + half, slope_b.to(kind), mask=mask)


@triton.jit
def gated(gate, up, y, count, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Write `act(gate) * up`, rounded after each of the two operations."""
    cells = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cells < count
    kind: tl.constexpr = y.dtype.element_ty
    wide, _ = activated(tl.load(gate + cells, mask=inside, other=0.0).to(tl.float32), GELU)
    wide = wide.to(kind).to(tl.float32) * tl.load(up + cells, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + cells, wide.to(kind), mask=inside)


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
