# mypy: ignore-errors
"""Triton kernels of attention over the pages of a KV cache.

One program computes all query heads that share a key-value head, for a block of queries of one sequence. Key blocks
are read by page, and masked keys are never loaded, so that no value of a neighbour or of an earlier user of a page
reaches a result.

**Parts.** The keys of a generated token are cut into parts of `SPLIT` keys, which run side by side. Beyond `MOST` parts,
each part takes twice, three times, ... as many keys, which bounds the memory of their sums. `combine` adds the sums by
number of the part. The cut depends on the length and the window of the sequence alone. The bits of a row therefore do
not depend on the batch, on neighbours, on the position of pages or on the size of the grid.

**Grid.** Its third dimension is any number of programs: program z of n computes the parts z, z + n, ... and ends at once
if there is none. A CUDA graph can so have one grid for all lengths. A single part is written without `combine`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cotrain_workers.engine.lora.fused.parts import plus_product
from cotrain_workers.engine.lora.fused.programs import INTERPRETED

__all__ = ["INTERPRETED", "attend", "combine"]

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # finite, because all keys of a block may be masked

#: A variant for a number or an address that is a multiple of 16 might have other bits.
UNSPECIALISED = ["spans", "lengths", "pages", "page_count", "capacity", "window"]


@triton.jit
def cut(length, count, window, N: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr):
    """Return the first key of a block, a multiple of `N`, the keys of a part and the number of parts."""
    begin = max(length - window, 0) // N * N
    keys = length + count - 1 - begin
    step = tl.cdiv(keys, SPLIT * MOST) * SPLIT
    return begin, step, tl.cdiv(keys, step)


@triton.jit(do_not_specialize=UNSPECIALISED)
def attend(
    q, keys, values, out, partial, sums, spans, lengths, pages,
    row_stride, head_stride, page_count, capacity, window, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr,
    CAPPED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the attention of a block of queries to `out`, or its sums to `partial` and `sums` if it has several parts.

    Query i of a block sees the keys before `lengths + i`, and `window` of them at most.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    span = spans + 3 * block
    first_row, count, sequence = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    length = tl.load(lengths + block)
    begin, step, parts = cut(length, count, window, N, SPLIT, MOST)
    if tl.program_id(2) < parts:
        number, columns, across = tl.arange(0, M), tl.arange(0, BLOCK), tl.arange(0, N)
        inside = columns < WIDTH
        query = number // GROUP
        live = (query < count)[:, None] & inside[None, :]
        limit = length + tl.minimum(query, count - 1)
        of_head = head * GROUP + number % GROUP
        rows = (first_row + query).to(tl.int64)
        x = tl.load(
            q + rows[:, None] * row_stride + of_head[:, None] * head_stride + columns[None, :],
            mask=live, other=0.0,
        )  # fmt: skip
        cells = across[:, None] * (HEADS * WIDTH) + columns[None, :]
        table = pages + sequence.to(tl.int64) * page_count
        stop = length + count - 1
        for part in range(tl.program_id(2), parts, tl.num_programs(2)):
            first = begin + part * step
            top = tl.full((M,), LOWEST, tl.float32)
            mass = tl.zeros((M,), tl.float32)
            total = tl.zeros((M, BLOCK), tl.float32)
            page = tl.load(table + first // PAGE)
            for at in range(first, min(first + step, stop), N):
                position = page.to(tl.int64) * PAGE + at % PAGE
                # Read one block ahead: an address that waits for its page would leave no load under way.
                page = tl.load(table + min(at + N, stop - 1) // PAGE)
                start = tl.multiple_of((position * HEADS + head) * WIDTH, 16)
                key = at + across
                known = (key < stop)[:, None] & inside[None, :]
                k = tl.load(keys + start + cells, mask=known, other=0.0)
                v = tl.load(values + start + cells, mask=known, other=0.0)
                scores = plus_product(tl.zeros((M, N), tl.float32), x, tl.trans(k), WIDE) * scale
                if CAPPED:
                    scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # tanh
                back = limit[:, None] - key[None, :]
                scores = tl.where((back > 0) & (back <= window), scores * LOG2_E, float("-inf"))
                peak = tl.maximum(top, tl.max(scores, 1))
                weights, fading = tl.exp2(scores - peak[:, None]), tl.exp2(top - peak)
                mass = mass * fading + tl.sum(weights, 1)
                total = plus_product(total * fading[:, None], weights.to(v.dtype), v, WIDE)
                top = peak
            if parts == 1:
                cell = (rows * (HEADS * GROUP) + of_head)[:, None] * WIDTH + columns[None, :]
                found = total * (1.0 / mass)[:, None]
                tl.store(out + cell, found.to(out.dtype.element_ty), mask=live)
            elif MOST > 1:
                own = (block.to(tl.int64) * (HEADS * GROUP) + of_head) * capacity + part
                tl.store(partial + own[:, None] * WIDTH + columns[None, :], total, mask=live)
                tl.store(sums + 2 * own, top, mask=query < count)
                tl.store(sums + 2 * own + 1, mass, mask=query < count)


@triton.jit(do_not_specialize=UNSPECIALISED)
def combine(
    out, partial, sums, spans, lengths, capacity, window,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Write the attention of one query of one head from the sums of its parts, unless it has a single part."""
    block, head = tl.program_id(0), tl.program_id(1)
    _, _, parts = cut(tl.load(lengths + block), 1, window, N, SPLIT, MOST)
    if parts > 1:
        number, columns = tl.arange(0, MOST), tl.arange(0, BLOCK)
        inside = columns < WIDTH
        there = number < parts
        own = (block.to(tl.int64) * HEADS + head) * capacity + number
        tops = tl.load(sums + 2 * own, mask=there, other=LOWEST)
        masses = tl.load(sums + 2 * own + 1, mask=there, other=0.0)
        totals = tl.load(
            partial + own[:, None] * WIDTH + columns[None, :],
            mask=there[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        top = tl.max(tops, 0)
        share = tl.exp2(tops - top)
        total, mass = tl.sum(totals * share[:, None], 0), tl.sum(masses * share, 0)
        cell = (tl.load(spans + 3 * block).to(tl.int64) * HEADS + head) * WIDTH + columns
        tl.store(out + cell, (total * (1.0 / mass)).to(out.dtype.element_ty), mask=inside)
