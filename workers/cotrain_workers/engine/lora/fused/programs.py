# mypy: ignore-errors
"""Triton kernels of fused LoRA. Each program computes one tile of one adapter, in an order set by its segment.

Sources:

* `shrink` and `expand` are the two products of LoRA as in Punica's SGMV (Chen et al. 2023,
  https://arxiv.org/abs/2310.18547).
* Mixed ranks are computed as in S-LoRA (https://arxiv.org/abs/2311.03285).
* `expand` adds to the base model's product before it is written, and `expand_back` does the same for the gradient
  of `x`. This is the fusion of LoRAFusion (https://arxiv.org/abs/2510.00206).

Gates and residual additions are fused, too.

Operands of the base model's products are copied by the tensor memory accelerator (`TMA`) where the device has one,
by descriptors that each program writes. Such a copy of rows may contain rows of the next adapter. No sum mixes them,
because a row of a product depends on one row of its left operand alone, and they are not stored.

Tables (`lora/fused/tables.py`):

* `tiles` int32 `[n, 3]` contains the segment, the first row and the end row of the segment.
* `entries` int64 `[segments + 1, HEAD + 2 * MODULES]`, with rows `stride` apart, contains rank, address of the weights,
  address of the gradient, and flags of experts. The offsets of A and B of each module follow.

A is stored as `[rank, inputs]` and B as `[rank, outputs]`, so kernels treat them alike. Values beyond a rank or a
width are never loaded, so that no zero is multiplied with a neighbour's NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cotrain_workers.engine.lora.fused.parts import (
    HEAD,
    activated,
    add_segments,
    aligned_weights,
    described,
    matrix_of,
    pick,
    plus_inputs,
    plus_low_rank,
    plus_outputs,
    tile_of,
    write_low,
)

#: True if Triton's interpreter runs the kernels on the CPU.
INTERPRETED = bool(triton.knobs.runtime.interpret)
#: Arguments that vary by micro-batch. Triton would compile another variant for 1 and for multiples of 16.
COUNTS = ("tile_count", "block_count")


def give_memory(device: torch.device) -> None:
    """Set the allocator of Triton, which takes memory for the descriptors that a kernel writes.

    Its allocator belongs to a thread, and backward runs in a thread of its own.
    """
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=device))


@triton.jit
def shrink(
    x0, x1, x2, low, tiles, entries, stride, width0, width1, width2, columns,
    MODULES: tl.constexpr, JOINT: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write `low = x M^T`; M is A (`SIDE` 0) or B^T (1). With `JOINT` all modules read x0, in one product.

    A tile's rows are shared by `PARTS` programs, because the product has few columns and must fill the device.
    """
    tile = tiles + 3 * (tl.program_id(0) // PARTS)
    first, stop = tl.load(tile + 1) + tl.program_id(0) % PARTS * BM, tl.load(tile + 2)
    entry = entries + tl.load(tile).to(tl.int64) * stride
    rank = tl.load(entry).to(tl.int32)
    count = rank
    if JOINT:
        count = rank * MODULES
    begin = tl.program_id(1) * BC
    if (begin < count) & (first < stop):
        number = begin + tl.arange(0, BC)
        known = number < count
        module = tl.program_id(2) + tl.zeros_like(number)
        if JOINT:
            module = number // rank
        row = number
        if JOINT:
            row = number - module * rank
        x = pick(tl.program_id(2), x0, x1, x2)
        width = pick(tl.program_id(2), width0, width1, width2)
        offset = tl.load(entry + HEAD + 2 * module + SIDE, mask=known, other=0)
        offset = tl.multiple_of(offset, [16])
        matrix = aligned_weights(entry, low.dtype.element_ty)
        starts = matrix + offset + row.to(tl.int64) * width
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        cells = module * rank + row
        write_low(low, x, starts, rows, rows, rows < stop, cells, known, width, columns, WIDE, BM, BC, BK)


@triton.jit(do_not_specialize=COUNTS)
def expand(
    x, w0, w1, w2, bias0, bias1, bias2, residual, low, y0, y1, y2, tiles, entries, stride, scales,
    height, inputs, width0, width1, width2, columns, tile_count, block_count,
    MODULES: tl.constexpr, BIASED: tl.constexpr, PLUS: tl.constexpr, GATE: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """Write `y = scale * low B^T + x W^T + b` of each module, plus `residual` if `PLUS` is set (one module).

    With `GATE` (1 SiLU, 2 GELU) a program computes the same columns of two modules and writes `act(y0) * y1` to y2.
    Products of LoRA come first, so that one accumulator serves both. A program computes one tile after the other.
    """
    source = described(x, height, inputs, BM, BK) if TMA else x
    for number in range(tl.program_id(0), tile_count * block_count, tl.num_programs(0)):
        across, block = tile_of(number, tile_count, block_count, BAND)
        tile = tiles + 3 * across
        segment, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        module = block * 0  # blocks are ordered by module
        start = block
        if MODULES > 1 and not GATE:
            if start >= tl.cdiv(width0, BN):
                module += 1
                start -= tl.cdiv(width0, BN)
        if MODULES > 2:
            if (module == 1) & (start >= tl.cdiv(width1, BN)):
                module += 1
                start -= tl.cdiv(width1, BN)
        weight, width = pick(module, w0, w1, w2), pick(module, width0, width1, width2)
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        live = rows < stop
        outs = (start * BN + tl.arange(0, BN)).to(tl.int64)
        inside = outs < width
        entry, scale = entries + segment.to(tl.int64) * stride, tl.load(scales + segment)
        total = tl.zeros((BM, BN), tl.float32)
        rank = tl.load(entry).to(tl.int32)
        kind: tl.constexpr = low.dtype.element_ty
        matrix = matrix_of(entry, module, 1, kind)
        total = scale * plus_low_rank(total, low, matrix, rank, rows, live, outs, width, columns, module, WIDE, BR)
        other = tl.zeros((BM, BN), tl.float32)
        if GATE:
            matrix = matrix_of(entry, 1, 1, kind)
            other = scale * plus_low_rank(other, low, matrix, rank, rows, live, outs, width, columns, 1, WIDE, BR)
        wide = described(weight, width, inputs, BN, BK) if TMA else weight
        wide1 = described(w1, width, inputs, BN, BK) if TMA and GATE else w1
        total, other = plus_outputs(
            total, other, x, weight, w1, source, wide, wide1, rows, live, first, 0, outs, start * BN, inside, inputs,
            GATE, TMA, WIDE, BK,
        )  # fmt: skip
        if BIASED:
            bias = tl.load(pick(module, bias0, bias1, bias2) + outs, mask=inside, other=0.0)
            total += bias.to(tl.float32)[None, :]
            if GATE:
                other += tl.load(bias1 + outs, mask=inside, other=0.0).to(tl.float32)[None, :]
        out = rows[:, None] * width + outs[None, :]
        mask = live[:, None] & inside[None, :]
        if PLUS:
            total += tl.load(residual + out, mask=mask, other=0.0).to(tl.float32)
        tl.store(pick(module, y0, y1, y2) + out, total.to(kind), mask=mask)
        if GATE:
            tl.store(y1 + out, other.to(kind), mask=mask)
            # Rounded like in the base model: backward recomputes the same value from the stored outputs.
            value, _ = activated(total.to(kind).to(tl.float32), GATE == 2)
            value = value.to(kind).to(tl.float32) * other.to(kind).to(tl.float32)
            tl.store(y2 + out, value.to(kind), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def expand_back(
    g0, g1, g2, w0, w1, w2, low, gate, up, gx, gx1, tiles, entries, stride, scales,
    height, inputs, width0, width1, width2, columns, tile_count, block_count,
    MODULES: tl.constexpr, GATE: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Write `gx`, `scale` times the sum over modules of `low A`, plus the sum of `gy W`; `low` is `gy B`.

    With `GATE`, x was `act(gate) * up`, and the gradients of gate and up are written to gx and gx1.
    """
    grads0 = described(g0, height, width0, BM, BK) if TMA else g0
    wide0 = described(w0, width0, inputs, BK, BN) if TMA else w0
    grads1 = described(g1, height, width1, BM, BK) if TMA and MODULES > 1 else g1
    wide1 = described(w1, width1, inputs, BK, BN) if TMA and MODULES > 1 else w1
    grads2 = described(g2, height, width2, BM, BK) if TMA and MODULES > 2 else g2
    wide2 = described(w2, width2, inputs, BK, BN) if TMA and MODULES > 2 else w2
    for number in range(tl.program_id(0), tile_count * block_count, tl.num_programs(0)):
        across, block = tile_of(number, tile_count, block_count, BAND)
        tile = tiles + 3 * across
        segment, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        live = rows < stop
        start = block * BN
        outs = start + tl.arange(0, BN)
        inside = outs < inputs
        entry, scale = entries + segment.to(tl.int64) * stride, tl.load(scales + segment)
        total = tl.zeros((BM, BN), tl.float32)
        rank = tl.load(entry).to(tl.int32)
        for module in range(MODULES):
            matrix = matrix_of(entry, module, 0, low.dtype.element_ty)
            total = plus_low_rank(total, low, matrix, rank, rows, live, outs, inputs, columns, module, WIDE, BR)
        total = scale * total
        # A descriptor cannot be picked by number, so modules are not a loop.
        total = plus_inputs(
            total, g0, w0, grads0, wide0, rows, live, first, 0, outs, start, inside, width0, inputs, TMA, WIDE, BK
        )  # fmt: skip
        if MODULES > 1:
            total = plus_inputs(
                total, g1, w1, grads1, wide1, rows, live, first, 0, outs, start, inside, width1, inputs, TMA, WIDE, BK
            )  # fmt: skip
        if MODULES > 2:
            total = plus_inputs(
                total, g2, w2, grads2, wide2, rows, live, first, 0, outs, start, inside, width2, inputs, TMA, WIDE, BK
            )  # fmt: skip
        kind: tl.constexpr = gx.dtype.element_ty
        cells = rows[:, None] * inputs + outs[None, :]
        mask = live[:, None] & inside[None, :]
        if GATE:
            total = total.to(kind).to(tl.float32)  # rounded like in the base model's backward
            factor = tl.load(up + cells, mask=mask, other=0.0).to(tl.float32)
            value, slope = activated(tl.load(gate + cells, mask=mask, other=0.0).to(tl.float32), GATE == 2)
            other = total * value.to(kind).to(tl.float32)
            tl.store(gx1 + cells, other.to(kind), mask=mask)
            total = (total * factor).to(kind).to(tl.float32) * slope
        tl.store(gx + cells, total.to(kind), mask=mask)


@triton.jit
def add_gradient(
    low, x0, x1, x2, owners, members, spans, entries, stride, scales, width0, width1, width2, columns,
    MODULES: tl.constexpr, JOINT: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add `scale * low^T x` of each segment to its adapter's gradient of A (`SIDE` 0) or of B^T (1).

    One program owns a tile of one gradient and adds the products of its segments one by one, in their order.
    """
    owner, z = tl.program_id(0), tl.program_id(2)
    begin, end = tl.load(owners + owner), tl.load(owners + owner + 1)
    entry = entries + tl.load(members + begin).to(tl.int64) * stride
    rank = tl.load(entry).to(tl.int32)
    count = rank
    which = z % MODULES
    block = z // MODULES
    if JOINT:
        count = rank * MODULES
        which = 0
        block = z
    if block * BC < count:
        number = block * BC + tl.arange(0, BC)
        known = number < count
        module = which + tl.zeros_like(number)
        if JOINT:
            module = number // rank
        row = number
        if JOINT:
            row = number - module * rank
        x, width = pick(which, x0, x1, x2), pick(which, width0, width1, width2)
        depth = tl.program_id(1) * BK + tl.arange(0, BK)
        inside = depth < width
        offset = tl.load(entry + HEAD + 2 * module + SIDE, mask=known, other=0)
        gradient = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        out = gradient + (offset + row.to(tl.int64) * width)[:, None] + depth[None, :]
        add_segments(
            out, low, module * rank + row, known, x, depth, inside, scales, members, begin, end, spans, scales,
            columns, width, False, WIDE, BC, BK, BT,
        )  # fmt: skip
