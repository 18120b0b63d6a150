# mypy: ignore-errors
"""Triton kernels of a mixture of experts in a decoder step, with the adapter of each token.

A row is a pair of a token and one of its experts, as in `expert_programs.py`. Adapters are slots of the sampler. Most
rows of an expert have an adapter of their own there, so LoRA is computed run by run: neighbouring rows with one slot.
A run is cut at multiples of `BM` rows. Each product of a row depends on that row and on its slot alone.

Tables (`decoding/step_experts.py`), on the device:

* `slots` int32 `[T]` contains the slot of each token.
* `rows` int32 `[3, P]` contains the pair of each row, its expert and its slot. Rows are sorted by expert, then by token.
* `positions` int32 `[P]` contains the row of each pair, and `bounds` int32 `[experts + 1, 1]` the first row of each expert.
* `tiles` are those of `expert_programs.py`, without segments.
* `entries` int64 `[slots, 3]` contains the rank of each slot, its address, and its kind: 1 if all matrices are of single
  experts. Otherwise experts share those on the model's width: A of gate and up, and B of down.

In a slot of rank r, a matrix begins at r / 8 of its `unit`, and the matrices of a layer's experts are adjacent. B is
transposed, and multiplied with the scale. `low` contains `x A^T` of each module. Shared matrices are multiplied by token:
A before the experts, B after the sum over a token's experts. `GATE` is 0 without a gate, else that of `gate_parts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cotrain_workers.engine.lora.fused.expert_programs import FIELDS
from cotrain_workers.engine.lora.fused.parts import (
    aligned_weights,
    gate_parts,
    plus_bias,
    plus_low_rank,
    plus_outputs,
    write_low,
)

ENTRY = tl.constexpr(3)  # columns of `entries`
#: Arguments that vary by step.
COUNTS = ("count", "tokens", "tile_count")


@triton.jit
def matrix_in_slot(entry, unit, expert, rank, width, KIND: tl.constexpr):
    """Return the address of A or B^T of an expert in a slot."""
    offset = tl.multiple_of((rank // 8).to(tl.int64) * unit, 16)
    return aligned_weights(entry, KIND) + offset + expert.to(tl.int64) * rank * width


@triton.jit(do_not_specialize=["count"])
def order_rows(
    index, kinds, slots, positions, rows, bounds, count, experts, groups, chosen,
    KINDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the row of each pair, its entries of `rows`, and the bounds of `groups` experts.

    The row of a pair is the number of pairs before it. With `KINDS`, tokens of kind 1 come after all others, in
    experts of their own: those from `experts` on.
    """
    number = tl.program_id(0) * BM + tl.arange(0, BM)
    is_pair = number < count
    real = tl.load(index + number, mask=is_pair, other=0).to(tl.int32)
    group = tl.where(is_pair, real, number - count)
    if KINDS:
        group += experts * tl.load(kinds + number // chosen, mask=is_pair, other=0)
    before = tl.zeros((BM,), tl.int32)
    for start in range(0, count, BN):
        other = start + tl.arange(0, BN)
        live = other < count
        theirs = tl.load(index + other, mask=live, other=0).to(tl.int32)
        if KINDS:
            theirs += experts * tl.load(kinds + other // chosen, mask=live, other=0)
        is_earlier = is_pair[:, None] & (other[None, :] < number[:, None])
        is_before = (theirs[None, :] < group[:, None]) | ((theirs[None, :] == group[:, None]) & is_earlier)
        before += tl.sum((is_before & live[None, :]).to(tl.int32), 1)
    tl.store(positions + number, before, mask=is_pair)
    tl.store(rows + before, number, mask=is_pair)
    tl.store(rows + count + before, real, mask=is_pair)
    tl.store(rows + 2 * count + before, tl.load(slots + number // chosen, mask=is_pair, other=0), mask=is_pair)
    tl.store(bounds + number - count, before, mask=(number >= count) & (number <= count + groups))


@triton.jit(do_not_specialize=["count", "tokens"])
def step_shrink(
    x, rows, slots, low, entries, unit0, unit1, count, tokens, chosen, width, columns,
    BY_ROW: tl.constexpr, MODULES: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write `low = x A^T` of one module for the run that begins at a row; other rows have no work.

    The two modules gate and up have a unit each, and skip slots of one kind. Without `BY_ROW` A is shared, and `x` and
    `low` have a row for each token. With it, `low` has the rows of pairs after those of tokens. The module down computes
    slots of both kinds, which have a unit each.
    """
    first = tl.program_id(0)
    module, begin = tl.program_id(1) % MODULES, tl.program_id(1) // MODULES * BC
    slot = tl.load(slots + first)
    expert = first * 0
    if BY_ROW:
        expert = tl.load(rows + count + first)
    starts_here = first % BM == 0
    if not starts_here:
        starts_here = tl.load(slots + first - 1) != slot
        if BY_ROW:
            starts_here = starts_here | (tl.load(rows + count + first - 1) != expert)
    entry = entries + slot.to(tl.int64) * ENTRY
    rank, kind = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    has_work = starts_here & (begin < rank)
    unit = tl.where(kind == 1, unit1, unit0)
    if MODULES > 1:
        unit = tl.where(module == 1, unit1, unit0)
        has_work = has_work & (kind == (1 if BY_ROW else 0))
    if has_work:
        run = first + tl.arange(0, BM)
        live = (run < count) & (run < (first // BM + 1) * BM)
        live = live & (tl.load(slots + run, mask=live, other=-1) == slot)
        source = run
        to = run
        if BY_ROW:
            live = live & (tl.load(rows + count + run, mask=live, other=-1) == expert)
            if MODULES > 1:
                source = tl.load(rows + run, mask=live, other=0) // chosen
                to = tokens + run
        number = begin + tl.arange(0, BC)
        starts = matrix_in_slot(entry, unit, expert, rank, width, low.dtype.element_ty) + number * width
        write_low(
            low, x, starts, source.to(tl.int64), to.to(tl.int64), live, module * rank + number, number < rank,
            width, columns, WIDE, BM, BC, BK,
        )  # fmt: skip


@triton.jit
def plus_runs(
    total, low, entries, unit0, unit1, slots, rows, sources, live, first, last, tokens, expert, outs, width, columns,
    module, GATE: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Return `total` plus `low B^T` of the rows of a tile, run by run; without a gate, only of slots of kind 1.

    `unit0` and `unit1` are the units of B in the two kinds of slots, and `width` is its padded width.
    """
    own = tl.load(slots + rows, mask=live, other=-1)
    row = first
    while row < last:
        slot = tl.load(slots + row)
        after = tl.min(tl.where((rows > row) & (own != slot), rows, last))
        mine = (rows >= row) & (rows < after)
        entry = entries + slot.to(tl.int64) * ENTRY
        rank, kind = tl.load(entry).to(tl.int32), tl.load(entry + 2).to(tl.int32)
        at = rows
        if GATE:
            at = tl.where(kind == 1, tokens + rows, sources)
        else:
            rank = rank * kind
        unit = tl.where(kind == 1, unit1, unit0)
        matrix = matrix_in_slot(entry, unit, expert, rank, width, low.dtype.element_ty)
        found = tl.zeros(total.shape, tl.float32)
        found = plus_low_rank(found, low, matrix, rank, at, mine, outs, width, columns, module, WIDE, BR)
        # Not added to other rows: a zero times an adapter's NaN is not a zero.
        total += tl.where(mine[:, None], found, 0.0)
        row = after
    return total


@triton.jit(do_not_specialize=COUNTS)
def step_expand(
    x, w0, w1, bias0, bias1, low, y, shares, rows, tiles, entries, unit0, unit1, unit2, unit3, inputs, width, pitch,
    bias_pitch, b_width, columns, chosen, count, tokens, tile_count,
    BIASED: tl.constexpr, GATE: tl.constexpr, PLUS: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Write the gated product of `x W^T + low B^T + b` of both modules for a tile; `x` has a row for each token.

    Without a gate, write `(x W^T + low B^T + b) * share` of one; `x` has a row for each pair. LoRA is added with `PLUS` only. The
    units are those of B of both modules in slots of kind 0, then of kind 1.
    """
    tile = tiles + FIELDS * tl.program_id(0)
    if tl.program_id(0) < tl.load(tiles + FIELDS * tile_count):
        expert, first, stop = tl.load(tile), tl.load(tile + 1).to(tl.int64), tl.load(tile + 2)
        numbers = first + tl.arange(0, BM)
        live = numbers < stop
        last = tl.minimum(first + BM, stop)
        pairs = tl.load(rows + numbers, mask=live, other=0)
        sources = numbers
        if GATE:
            sources = (pairs // chosen).to(tl.int64)
        start = tl.program_id(1) * BN
        outs = (start + tl.arange(0, BN)).to(tl.int64)
        inside = outs < width
        slots = rows + 2 * count
        total = tl.zeros((BM, BN), tl.float32)
        other = tl.zeros((BM, BN), tl.float32)
        if PLUS:
            total = plus_runs(
                total, low, entries, unit0, unit2, slots, numbers, sources, live, first, last, tokens, expert, outs,
                b_width, columns, 0, GATE, WIDE, BR,
            )  # fmt: skip
            if GATE:
                other = plus_runs(
                    other, low, entries, unit1, unit3, slots, numbers, sources, live, first, last, tokens, expert, outs,
                    b_width, columns, 1, GATE, WIDE, BR,
                )  # fmt: skip
        total, other = plus_outputs(
            total, other, x, w0, w1, x, w0, w1, sources, live, 0, expert * pitch, outs, start, inside, inputs,
            GATE, False, WIDE, BK,
        )  # fmt: skip
        if BIASED:
            total = plus_bias(total, bias0, expert * bias_pitch, outs, inside)
            if GATE:
                other = plus_bias(other, bias1, expert * bias_pitch, outs, inside)
        kind: tl.constexpr = low.dtype.element_ty
        if GATE:
            # Rounded like in training.
            value, _, factor, _ = gate_parts(total.to(kind).to(tl.float32), other.to(kind).to(tl.float32), GATE)
            total = value.to(kind).to(tl.float32) * factor
        else:
            total = total * tl.load(shares + pairs, mask=live, other=0.0).to(tl.float32)[:, None]
        cells = numbers[:, None] * width + outs[None, :]
        tl.store(y + cells, total.to(kind), mask=live[:, None] & inside[None, :])


@triton.jit
def step_combine(
    y, low, positions, shares, slots, entries, unit, out, width, b_width, columns, chosen,
    BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Write the sum of a token's rows, in the order of its experts, plus `sum(share * low) B^T` for slots of kind 0."""
    token = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = outs < width
    total = tl.zeros((BN,), tl.float32)
    for at in range(chosen):
        row = tl.load(positions + token * chosen + at).to(tl.int64)
        total += tl.load(y + row * width + outs, mask=inside, other=0.0).to(tl.float32)
    entry = entries + tl.load(slots + token).to(tl.int64) * ENTRY
    rank = (tl.load(entry) * (1 - tl.load(entry + 2))).to(tl.int32)
    kind: tl.constexpr = out.dtype.element_ty
    matrix = matrix_in_slot(entry, unit, token * 0, rank, b_width, kind)
    for begin in range(0, rank, BR):
        ranks = begin + tl.arange(0, BR)
        known = ranks < rank
        sums = tl.zeros((BR,), tl.float32)
        for at in range(chosen):
            row = tl.load(positions + token * chosen + at).to(tl.int64)
            share = tl.load(shares + token * chosen + at).to(tl.float32)
            sums += share * tl.load(low + row * columns + ranks, mask=known, other=0.0).to(tl.float32)
        cells = ranks[:, None] * b_width + outs[None, :]
        block = tl.load(matrix + cells, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(sums[:, None] * block, 0)
    tl.store(out + token * width + outs, total.to(kind), mask=inside)
