# mypy: ignore-errors
"""Triton kernels of a mixture of experts with fused LoRA.

A row is a pair of a token and one of its experts. Rows are sorted by expert, and within it by token, so that those
of one adapter are adjacent. A tile belongs to an expert and may contain rows of many adapters. LoRA is added for one
adapter after the other, and only to its rows, so that no value of a neighbour reaches a row. The base model's product
of a row depends on that row alone. Each value is written by one program, so there are no atomic operations.

Tables (`lora/fused/fused_experts.py`), all computed on the device:

* `bounds` int32 `[experts + 1, 1 + 2 * segments]` contains the first row of an expert, then the first row and the end
  row of each segment within it.
* `tiles` int32 `[tiles + 1, 5]` contains the expert, the first row and the end row of the expert, then the first
  segment and the end of the segments of a tile. The number of tiles in use is in the last row.
* `entries` are those of `programs.py`. Bit `SIDE` of the flags is set if each expert has its own matrix. The
  matrices of experts are adjacent.

Arguments: `low` `[rows, columns]` contains `x A^T` or `gy B` of each module, and M is A (`SIDE` 0) or B^T (1). `GATE` is
0 without a gate, else that of `gate_parts`. `TMA` and `WIDE` are those of `programs.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cotrain_workers.engine.lora.fused.parts import (
    HEAD,
    add_segments,
    described,
    gate_parts,
    matrix_of,
    pick,
    plus_bias,
    plus_inputs,
    plus_low_rank,
    plus_outputs,
    tile_of,
    write_low,
)

FIELDS = tl.constexpr(5)  # of a tile
#: Arguments that vary by micro-batch.
COUNTS = ("tile_count", "block_count", "segments", "height")


@triton.jit
def find_tiles(
    bounds, tiles, tile_count, experts, segments,
    EXPERTS: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write one tile of an expert's rows. The first program also writes the number of tiles, to the row after all tiles."""
    number, width = tl.program_id(0), 1 + 2 * segments
    each = tl.arange(0, EXPERTS)
    known = each < experts
    firsts = tl.load(bounds + each * width, mask=known, other=0)
    stops = tl.load(bounds + (each + 1) * width, mask=known, other=0)
    counts = tl.cdiv(stops - firsts, BM)
    ends = tl.cumsum(counts, 0)
    expert = tl.sum((ends <= number).to(tl.int32), 0)
    count = tl.sum(counts, 0)
    if number == 0:
        tl.store(tiles + FIELDS * tile_count, count)
    if number < count:
        mine = each == expert
        first = tl.sum(tl.where(mine, firsts + (number - ends + counts) * BM, 0), 0)
        stop = tl.sum(tl.where(mine, stops, 0), 0)
        last = tl.minimum(first + BM, stop)
        # Segments that end before the tile, and those that begin before its end.
        before, until = number * 0, number * 0
        for start in range(0, segments, SEGMENTS):
            segment = start + tl.arange(0, SEGMENTS)
            span = bounds + expert * width + 1 + 2 * segment
            begins = tl.load(span, mask=segment < segments, other=2147483647)
            finishes = tl.load(span + 1, mask=segment < segments, other=2147483647)
            before += tl.sum((finishes <= first).to(tl.int32), 0)
            until += tl.sum((begins < last).to(tl.int32), 0)
        tile = tiles + FIELDS * number
        tl.store(tile, expert)
        tl.store(tile + 1, first)
        tl.store(tile + 2, stop)
        tl.store(tile + 3, before)
        tl.store(tile + 4, until)


@triton.jit
def own_matrix(entry, module, expert, rank, width, SIDE: tl.constexpr, KIND: tl.constexpr):
    """Return the address of A or B^T of an expert, or of the one that all experts share."""
    number = ((tl.load(entry + 3) >> SIDE) & 1) * expert
    return matrix_of(entry, module, SIDE, KIND) + number * rank * width


@triton.jit
def plus_adapters(
    total, low, bounds, entries, stride, scales, tile, expert, segments, rows, outs, width, columns, module,
    SIDE: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Return `total` plus `scale * low M` of the adapters in a tile, each on its own rows."""
    spans = bounds + expert * (1 + 2 * segments) + 1
    for segment in range(tl.load(tile + 3), tl.load(tile + 4)):
        mine = rows >= tl.load(spans + 2 * segment)
        mine = mine & (rows < tl.load(spans + 2 * segment + 1))
        entry = entries + segment * stride
        rank = tl.load(entry).to(tl.int32)
        matrix = own_matrix(entry, module, expert, rank, width, SIDE, low.dtype.element_ty)
        found = tl.zeros(total.shape, tl.float32)
        found = plus_low_rank(found, low, matrix, rank, rows, mine, outs, width, columns, module, WIDE, BR)
        # Not added to other rows: a zero times an adapter's NaN is not a zero.
        total += tl.where(mine[:, None], tl.load(scales + segment) * found, 0.0)
    return total


@triton.jit(do_not_specialize=COUNTS)
def expert_shrink(
    x0, x1, low, bounds, entries, stride, segments, width, columns,
    MODULES: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write `low = x M^T` of one module, for the rows of one adapter in one expert, by `PARTS` programs.

    Adapters whose experts share M are skipped.
    """
    expert, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    module, begin = tl.program_id(2) % MODULES, tl.program_id(2) // MODULES * BC
    entry = entries + segment.to(tl.int64) * stride
    rank = tl.load(entry).to(tl.int32)
    span = bounds + expert * (1 + 2 * segments) + 1 + 2 * segment
    stop = tl.load(span + 1)
    is_own = (tl.load(entry + 3) >> SIDE) & 1 == 1
    if is_own & (begin < rank):
        number = begin + tl.arange(0, BC)
        known = number < rank
        x = pick(module, x0, x1, x1)
        starts = own_matrix(entry, module, expert, rank, width, SIDE, low.dtype.element_ty)
        starts += number * width
        for first in range(tl.load(span) + tl.program_id(1) * BM, stop, PARTS * BM):
            rows = (first + tl.arange(0, BM)).to(tl.int64)
            cells = module * rank + number
            write_low(low, x, starts, rows, rows, rows < stop, cells, known, width, columns, WIDE, BM, BC, BK)


@triton.jit(do_not_specialize=COUNTS)
def expert_expand(
    x, w0, w1, bias0, bias1, low, y0, y1, y2, shares, tiles, bounds, entries, stride, scales,
    height, inputs, width, pitch, bias_pitch, columns, experts, segments, tile_count, block_count,
    BIASED: tl.constexpr, GATE: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Write `y = scale * low B^T + x W^T + b` of the experts; their weights are `pitch` rows apart.

    With `GATE` two modules are computed, and `act(y0) * y1` is written to y2. Without it, there is one module, and
    each row is multiplied with its share of the token.
    """
    kind: tl.constexpr = low.dtype.element_ty
    last = (experts - 1) * pitch + width
    source = described(x, height, inputs, BM, BK) if TMA else x
    wide = described(w0, last, inputs, BN, BK) if TMA else w0
    wide1 = described(w1, last, inputs, BN, BK) if TMA and GATE else w1
    live_tiles = tl.load(tiles + FIELDS * tile_count)
    for number in range(tl.program_id(0), live_tiles * block_count, tl.num_programs(0)):
        across, block = tile_of(number, live_tiles, block_count, BAND)
        tile = tiles + FIELDS * across
        expert, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        live = rows < stop
        start = block * BN
        outs = (start + tl.arange(0, BN)).to(tl.int64)
        inside = outs < width
        total = plus_adapters(
            tl.zeros((BM, BN), tl.float32), low, bounds, entries, stride, scales, tile, expert, segments,
            rows, outs, width, columns, 0, 1, WIDE, BR,
        )  # fmt: skip
        other = tl.zeros((BM, BN), tl.float32)
        if GATE:
            other = plus_adapters(
                other, low, bounds, entries, stride, scales, tile, expert, segments,
                rows, outs, width, columns, 1, 1, WIDE, BR,
            )  # fmt: skip
        top = expert * pitch
        total, other = plus_outputs(
            total, other, x, w0, w1, source, wide, wide1, rows, live, first, top, outs, start, inside, inputs,
            GATE, TMA, WIDE, BK,
        )  # fmt: skip
        if BIASED:
            total = plus_bias(total, bias0, expert * bias_pitch, outs, inside)
            if GATE:
                other = plus_bias(other, bias1, expert * bias_pitch, outs, inside)
        out = rows[:, None] * width + outs[None, :]
        mask = live[:, None] & inside[None, :]
        if GATE:
            tl.store(y1 + out, other.to(kind), mask=mask)
            value, _, factor, _ = gate_parts(total.to(kind).to(tl.float32), other.to(kind).to(tl.float32), GATE)
            value = value.to(kind).to(tl.float32) * factor
            tl.store(y2 + out, value.to(kind), mask=mask)
        else:
            total = total * tl.load(shares + rows, mask=live, other=0.0)[:, None]
        tl.store(y0 + out, total.to(kind), mask=mask)


@triton.jit
def loaded(gate, up, cells, mask):
    """Return values of gate and up in fp32."""
    first = tl.load(gate + cells, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(up + cells, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def expert_expand_back(
    g0, g1, w0, w1, low, gate, up, gx, gx1, slopes, shares, tiles, bounds, entries, stride, scales,
    height, inputs, width, pitch, columns, experts, segments, tile_count, block_count,
    MODULES: tl.constexpr, GATE: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x: the sum over modules of `scale * low A + gy W`; `low` is `gy B`.

    With `GATE`, x was `act(gate) * up`, and `gy` is the gradient of the weighted sum of the experts. Then the
    gradients of gate and up are written to gx and gx1. Each block of columns writes its part of the gradient of each
    row's share to `slopes` `[rows, blocks]`.
    """
    kind: tl.constexpr = gx.dtype.element_ty
    last = (experts - 1) * pitch + width
    grads0 = described(g0, height, width, BM, BK) if TMA else g0
    wide0 = described(w0, last, inputs, BK, BN) if TMA else w0
    grads1 = described(g1, height, width, BM, BK) if TMA and MODULES > 1 else g1
    wide1 = described(w1, last, inputs, BK, BN) if TMA and MODULES > 1 else w1
    live_tiles = tl.load(tiles + FIELDS * tile_count)
    for number in range(tl.program_id(0), live_tiles * block_count, tl.num_programs(0)):
        across, block = tile_of(number, live_tiles, block_count, BAND)
        tile = tiles + FIELDS * across
        expert, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        rows = (first + tl.arange(0, BM)).to(tl.int64)
        live = rows < stop
        start = block * BN
        outs = start + tl.arange(0, BN)
        inside = outs < inputs
        total = tl.zeros((BM, BN), tl.float32)
        for module in range(MODULES):
            total = plus_adapters(
                total, low, bounds, entries, stride, scales, tile, expert, segments,
                rows, outs, inputs, columns, module, 0, WIDE, BR,
            )  # fmt: skip
        top = expert * pitch
        total = plus_inputs(
            total, g0, w0, grads0, wide0, rows, live, first, top, outs, start, inside, width, inputs,
            TMA, WIDE, BK,
        )  # fmt: skip
        if MODULES > 1:
            total = plus_inputs(
                total, g1, w1, grads1, wide1, rows, live, first, top, outs, start, inside, width, inputs,
                TMA, WIDE, BK,
            )  # fmt: skip
        cells = rows[:, None] * inputs + outs[None, :]
        mask = live[:, None] & inside[None, :]
        if GATE:
            value, _, factor, rise = gate_parts(*loaded(gate, up, cells, mask), GATE)
            value = value.to(kind).to(tl.float32)
            inner = (value * factor).to(kind).to(tl.float32)
            part = tl.sum(tl.where(mask, total * inner, 0.0), 1)
            tl.store(slopes + rows * block_count + block, part, mask=live)
            share = tl.load(shares + rows, mask=live, other=0.0)
            total = (total * share[:, None]).to(kind).to(tl.float32)
            tl.store(gx1 + cells, (total * value * rise).to(kind), mask=mask)
            # Loaded again, because there are not enough registers to keep all parts.
            _, slope, factor, _ = gate_parts(*loaded(gate, up, cells, mask), GATE)
            total = (total * factor).to(kind).to(tl.float32) * slope
        tl.store(gx + cells, total.to(kind), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def expert_gradient(
    low, x0, x1, shares, owners, members, bounds, entries, stride, segments, scales, width, columns,
    MODULES: tl.constexpr, SIDE: tl.constexpr, SHARED: tl.constexpr, WIDE: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add `scale * low^T x` to an expert's gradient of A (`SIDE` 0) or of B^T (1), for adapters that have one each.

    One program owns a tile of one gradient and adds the products of its segments one by one, in their order. With
    `SHARED`, rows of `low` are multiplied with their shares of the tokens.
    """
    expert, owner = tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(width, BK)
    module = tl.program_id(0) // blocks % MODULES
    number = tl.program_id(0) // (blocks * MODULES) * BC + tl.arange(0, BC)
    depth = tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    begin, end = tl.load(owners + owner), tl.load(owners + owner + 1)
    entry = entries + tl.load(members + begin).to(tl.int64) * stride
    rank = tl.load(entry).to(tl.int32)
    spans = bounds + expert * (1 + 2 * segments) + 1
    count = 0
    for at in range(begin, end):
        span = spans + 2 * tl.load(members + at)
        count += tl.load(span + 1) - tl.load(span)
    is_own = (tl.load(entry + 3) >> SIDE) & 1 == 1
    if is_own & (count > 0) & (tl.program_id(0) // (blocks * MODULES) * BC < rank):
        known, inside = number < rank, depth < width
        x = pick(module, x0, x1, x1)
        offset = tl.load(entry + HEAD + 2 * module + SIDE) + expert.to(tl.int64) * rank * width
        gradient = tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + offset
        out = gradient + number[:, None] * width + depth[None, :]
        add_segments(
            out, low, module * rank + number, known, x, depth, inside, shares, members, begin, end, spans, scales,
            columns, width, SHARED, WIDE, BC, BK, BT,
        )  # fmt: skip


@triton.jit
def expert_sum(
    x, shares, positions, out, width, chosen, SHARED: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Write the sum of a token's rows, in the order of its experts; with `SHARED`, each times its share."""
    token = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = outs < width
    total = tl.zeros((BN,), tl.float32)
    for at in range(chosen):
        row = tl.load(positions + token * chosen + at)
        value = tl.load(x + row * width + outs, mask=inside, other=0.0).to(tl.float32)
        if SHARED:
            value *= tl.load(shares + row)
        total += value
    tl.store(out + token * width + outs, total.to(out.dtype.element_ty), mask=inside)
