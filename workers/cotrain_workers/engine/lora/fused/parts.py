# mypy: ignore-errors
"""Parts of the Triton kernels of dense layers and of experts: addresses, blocks, and the loops of products.

`programs.py` describes the tables, and how operands are copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEAD = tl.constexpr(4)
#: Constants of the gate of gpt-oss.
LIMIT, STEEPNESS = tl.constexpr(7.0), tl.constexpr(1.702)


@triton.jit
def pick(at, first, second, third):
    """Return one of three values by index."""
    chosen = first
    if at == 1:
        chosen = second
    if at == 2:
        chosen = third
    return chosen


@triton.jit
def plus_product(total, left, right, WIDE: tl.constexpr):
    """Return `total + left @ right` in fp32; `WIDE` is set for the interpreter, which stores bf16 as integers."""
    if WIDE:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def tile_of(at, rows, columns, BAND: tl.constexpr):
    """Return row and column of a tile, in bands of rows whose operands stay in cache (Triton's matmul tutorial)."""
    first = at // (BAND * columns) * BAND
    height = min(rows - first, BAND)
    within = at % (BAND * columns)
    return first + within % height, within // height


@triton.jit
def described(base, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the descriptor with which the tensor memory accelerator copies tiles of `[height, width]`."""
    return tl.make_tensor_descriptor(base, [height, width], [width, 1], [ROWS, COLUMNS])


@triton.jit
def aligned_weights(entry, KIND: tl.constexpr):
    """Return the address of an adapter's weights, marked as aligned.

    An address from a table carries no alignment, and Triton would then load two bytes at a time. The hint holds
    because arenas begin at 512 bytes and matrices at `spec.ALIGN` values. It must follow the cast, which drops it.
    """
    return tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(KIND)), 16)


@triton.jit
def matrix_of(entry, module, SIDE: tl.constexpr, KIND: tl.constexpr):
    """Return the address of A (`SIDE` 0) or B^T of a module."""
    offset = tl.load(entry + HEAD + 2 * module + SIDE)
    return aligned_weights(entry, KIND) + tl.multiple_of(offset, 16)


@triton.jit
def load_block(matrix, rows, columns, width, live, inside):
    """Return a block of a matrix with rows of `width` values; 0 where rows are not live or columns not inside."""
    cells = matrix + rows[:, None] * width + columns[None, :]
    return tl.load(cells, mask=live[:, None] & inside[None, :], other=0.0)


@triton.jit
def plus_low_rank(
    total, low, matrix, rank, rows, live, outs, width, columns, module,
    WIDE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Return `total + low M`, BR ranks at a time.

    `low` is restricted to a module's columns, and M is its `matrix` `[rank, width]`.
    """
    for begin in range(0, rank, BR):
        ranks = begin + tl.arange(0, BR)
        known = ranks < rank
        left = load_block(low, rows, module * rank + ranks, columns, live, known)
        right = load_block(matrix, ranks, outs, width, known, outs < width)
        total = plus_product(total, left, right, WIDE)
    return total


@triton.jit
def plus_outputs(
    total, other, x, weight, weight1, source, wide, wide1, rows, live, first, top, outs, start, inside, inputs,
    GATE: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return `total + x W^T` and, with `GATE`, `other + x W1^T`. The weights begin `top` rows below their addresses.

    With `TMA`, `source`, `wide` and `wide1` are the descriptors of `x` and the weights.
    """
    for at in range(0, inputs, BK):
        depth = at + tl.arange(0, BK)
        known = depth < inputs
        cells = (top + outs[None, :]) * inputs + depth[:, None]
        mask = inside[None, :] & known[:, None]
        if TMA:
            left = source.load([first, at])
            right = wide.load([top + start, at]).T
        else:
            left = load_block(x, rows, depth, inputs, live, known)
            right = tl.load(weight + cells, mask=mask, other=0.0)
        total = plus_product(total, left, right, WIDE)
        if GATE:
            right = wide1.load([top + start, at]).T if TMA else tl.load(weight1 + cells, mask=mask, other=0.0)
            other = plus_product(other, left, right, WIDE)
    return total, other


@triton.jit
def plus_inputs(
    total, grad, weight, source, wide, rows, live, first, top, outs, start, inside, width, inputs,
    TMA: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return `total + gy W` of one module, whose weight begins `top` rows below its address.

    With `TMA`, `source` and `wide` are the descriptors of `grad` and the weight.
    """
    for at in range(0, width, BK):
        depth = (at + tl.arange(0, BK)).to(tl.int64)
        known = depth < width
        if TMA:
            left = source.load([first, at])
            right = wide.load([top + at, start])
        else:
            left = load_block(grad, rows, depth, width, live, known)
            right = load_block(weight, top + depth, outs, inputs, known, inside)
        total = plus_product(total, left, right, WIDE)
    return total


@triton.jit
def write_low(
    low, x, starts, rows, to, live, cells, known, width, columns,
    WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write `x M^T` of some `rows` of x to rows `to` and columns `cells` of `low`.

    `starts` are the addresses of the rows of M.
    """
    total = tl.zeros((BM, BC), tl.float32)
    for at in range(0, width, BK):
        depth = at + tl.arange(0, BK)
        inside = depth < width
        left = load_block(x, rows, depth, width, live, inside)
        right = tl.load(starts[None, :] + depth[:, None], mask=known[None, :] & inside[:, None], other=0.0)
        total = plus_product(total, left, right, WIDE)
    out = low + to[:, None] * columns + cells[None, :]
    tl.store(out, total.to(low.dtype.element_ty), mask=live[:, None] & known[None, :])


@triton.jit
def add_segments(
    out, low, cells, known, x, depth, inside, shares, members, begin, end, spans, scales, columns, width,
    SHARED: tl.constexpr, WIDE: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add `scale * low^T x` of the segments of one gradient to a tile of it, one by one, in their order.

    `cells` are columns of `low`, and `depth` are columns of `x`. With `SHARED`, rows of `low` are multiplied with
    their shares of the tokens.
    """
    mask = known[:, None] & inside[None, :]
    total = tl.load(out, mask=mask, other=0.0)
    for at in range(begin, end):
        segment = tl.load(members + at)
        stop = tl.load(spans + 2 * segment + 1)
        found = tl.zeros((BC, BK), tl.float32)
        for start in range(tl.load(spans + 2 * segment), stop, BT):
            rows = (start + tl.arange(0, BT)).to(tl.int64)
            live = rows < stop
            left = tl.load(
                low + rows[None, :] * columns + cells[:, None],
                mask=known[:, None] & live[None, :], other=0.0,
            )  # fmt: skip
            if SHARED:
                share = tl.load(shares + rows, mask=live, other=0.0)
                left = (left.to(tl.float32) * share[None, :]).to(low.dtype.element_ty)
            right = load_block(x, rows, depth, width, live, inside)
            found = plus_product(found, left, right, WIDE)
        total += tl.load(scales + segment) * found
    tl.store(out, total, mask=mask)


@triton.jit
def gate_parts(gate, up, GATE: tl.constexpr):
    """Return the gate's value and its derivative, and the factor that `up` becomes, and its derivative.

    `GATE` is 1 for SiLU, 2 for GELU and 3 for that of gpt-oss, which limits both values and adds 1 to `up`.
    """
    value, slope = gate, gate
    factor, rise = up, tl.full(up.shape, 1.0, tl.float32)
    if GATE == 3:
        # Not by minimum and maximum, which would hide a NaN.
        limited = tl.where(gate > LIMIT, LIMIT, gate)
        share = tl.sigmoid(limited * STEEPNESS)
        value = limited * share
        slope = tl.where(gate > LIMIT, 0.0, share + value * STEEPNESS * (1.0 - share))
        factor = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        rise = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, 1.0)
    else:
        value, slope = activated(gate, GATE == 2)
    return value, slope, factor, rise


@triton.jit
def plus_bias(total, bias, first, outs, inside):
    """Return `total` plus a bias that begins at `first`."""
    return total + tl.load(bias + first + outs, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """Return SiLU, or GELU by tanh, of fp32 values, and the derivative: both are `gate * sigmoid(z)`."""
    z, slope = gate, tl.full(gate.shape, 1.0, tl.float32)
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    share = tl.sigmoid(z)
    return gate * share, share + gate * share * (1.0 - share) * slope
