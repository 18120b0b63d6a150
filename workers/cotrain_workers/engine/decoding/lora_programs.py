# mypy: ignore-errors
"""Triton kernels of LoRA in a decoder step, for all modules that read the same `x`.

The two products are those of Punica's SGMV (Chen et al. 2023). A tile has 16 rows of one adapter at most, for generated
tokens and for prompts, so that a row has the same bits in both.

`table` int64 `[1 + n, 4]` begins with a row that holds the number of tiles. The others hold the first row, the end of
the adapter's rows, its padded rank, and the address of its slot. A matrix lies at `rank / 8` times its offset in a slot
of rank 8.

**Parts.** The depth of `x A^T` is cut into `SPLITS` parts, which run side by side. `expand_rows` adds them in order.
The cut depends on the width alone, so the bits of a row do not depend on other rows, on slots, or on the size of the
grid.

**Grid.** Program z of n computes the blocks z, z + n, ... of all tiles. A CUDA graph can so have one grid for any
adapters. Rows beyond a tile, a rank or a width are never loaded, so that no zero is multiplied with a neighbour's NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cotrain_workers.engine.lora.fused.parts import load_block, pick, plus_product
from cotrain_workers.engine.lora.fused.programs import INTERPRETED

__all__ = ["INTERPRETED", "expand_rows", "shrink_rows"]

LEAST_RANK = tl.constexpr(8)  # `slot_pool.MIN_RANK`

#: A variant for a number that is a multiple of 16 might have other bits.
UNSPECIALISED = ["height", "largest", "block_count"]


@triton.jit
def rows_of(tile, M: tl.constexpr):
    """Return the rows of a tile, which of them are live, and the rank of their adapter."""
    rows = tl.load(tile) + tl.arange(0, M)
    return rows, rows < tl.load(tile + 1), tl.load(tile + 2).to(tl.int32)


@triton.jit
def matrix_of(tile, offset, rank, KIND: tl.constexpr):
    """Return the address of a matrix, marked as aligned: slots and matrices begin at multiples of 32 bytes."""
    slot = tl.multiple_of(tl.load(tile + 3).to(tl.pointer_type(KIND)), 16)
    return slot + tl.multiple_of(offset.to(tl.int64) * (rank // LEAST_RANK), 16)


@triton.jit(do_not_specialize=UNSPECIALISED)
def shrink_rows(
    x, sums, table, pitch, width, height, largest, at0, at1, at2,
    MODULES: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the parts of `x A^T` of each module to `sums`, fp32 `[SPLITS, height, MODULES * largest]`."""
    largest = tl.multiple_of(largest, 8)
    depth = tl.cdiv(width, SPLITS * BK) * BK
    count = tl.load(table).to(tl.int32) * (SPLITS * MODULES)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        module, split = number % MODULES, number // MODULES % SPLITS
        tile = table + 4 * (1 + number // (MODULES * SPLITS))
        rows, live, rank = rows_of(tile, M)
        matrix = matrix_of(tile, pick(module, at0, at1, at2), rank, x.dtype.element_ty)
        begin = split * depth
        for first in range(0, rank, R):
            ranks = first + tl.arange(0, R)
            known = ranks < rank
            total = tl.zeros((M, R), tl.float32)
            for at in range(begin, min(begin + depth, width), BK):
                columns = at + tl.arange(0, BK)
                inside = columns < width
                left = load_block(x, rows, columns, pitch, live, inside)
                right = load_block(matrix, ranks, columns, width, known, inside)
                total = plus_product(total, left, tl.trans(right), WIDE)
            cells = (split * height + rows) * (MODULES * largest) + module * largest
            tl.store(sums + cells[:, None] + ranks[None, :], total, mask=live[:, None] & known[None, :])


@triton.jit(do_not_specialize=UNSPECIALISED)
def expand_rows(
    x, sums, y0, y1, y2, table, height, largest, block_count, width0, width1, width2, at0, at1, at2,
    MODULES: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Add `x A^T B^T` to y of each module, given the parts of `x A^T`; the low-rank values are rounded like `x`."""
    kind: tl.constexpr = x.dtype.element_ty
    largest = tl.multiple_of(largest, 8)
    count = tl.load(table).to(tl.int32) * block_count
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        tile, block = table + 4 * (1 + number // block_count), number % block_count
        module = block * 0  # blocks are ordered by module
        if MODULES > 1:
            if block >= tl.cdiv(width0, BN):
                module += 1
                block -= tl.cdiv(width0, BN)
        if MODULES > 2:
            if (module == 1) & (block >= tl.cdiv(width1, BN)):
                module += 1
                block -= tl.cdiv(width1, BN)
        rows, live, rank = rows_of(tile, M)
        width = pick(module, width0, width1, width2)
        matrix = matrix_of(tile, pick(module, at0, at1, at2), rank, kind)
        outs = block * BN + tl.arange(0, BN)
        inside = outs < width
        out = pick(module, y0, y1, y2) + rows[:, None] * width + outs[None, :]
        mask = live[:, None] & inside[None, :]
        total = tl.load(out, mask=mask, other=0.0).to(tl.float32)
        for first in range(0, rank, R):
            ranks = first + tl.arange(0, R)
            known = ranks < rank
            right = load_block(matrix, ranks, outs, tl.cdiv(width, 16) * 16, known, inside)
            low = tl.zeros((M, R), tl.float32)
            for split in tl.static_range(SPLITS):
                cells = (split * height + rows) * (MODULES * largest) + module * largest
                low += load_block(sums, cells, ranks, 1, live, known)
            total = plus_product(total, low.to(kind), right, WIDE)
        tl.store(out, total.to(out.dtype.element_ty), mask=mask)
