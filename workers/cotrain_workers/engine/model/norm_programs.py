# mypy: ignore-errors
"""The kernels of RMS norms: each program has one row, whose bits depend on nothing else.

`ONE` is Gemma's norm, scaled by one more than the weight and rounded once; the others round, then scale.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def norm_back(
    x, weight, gy, kept, gx, width, eps, ONE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradient of a row of `x`: that of its norm, and `kept`, that of `x` itself."""
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
    slope += tl.load(kept + cells, mask=inside, other=0.0).to(tl.float32)
    tl.store(gx + cells, slope.to(kind), mask=inside)
