"""Plain code in place of the LoRA kernels of decoding, which checks the contract of their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cotrain_workers.engine.decoding.lora_kernel import ROWS, SPLITS
from cotrain_workers.engine.decoding.slot_pool import MIN_RANK
from cotrain_workers.engine.spec import aligned


def plain_shrink(x: torch.Tensor, table: torch.Tensor, most: int, largest: int, offsets: Sequence[int]) -> torch.Tensor:
    """Return what `lora_kernel.shrink_rows` returns, with a single part that is not zero."""
    sums = torch.full((SPLITS, len(x), len(offsets) * largest), torch.nan)
    for rows, rank, slot in tiles(table, most, len(x)):
        assert rank <= largest
        for module, offset in enumerate(offsets):
            a = matrix(slot, offset, rank, x.shape[1], x.dtype)
            own = slice(module * largest, module * largest + rank)
            sums[:, rows, own] = 0
            sums[0, rows, own] = x[rows].float() @ a.float().t()
    return sums


def plain_expand(
    x: torch.Tensor,
    sums: torch.Tensor,
    ys: Sequence[torch.Tensor],
    table: torch.Tensor,
    most: int,
    offsets: Sequence[int],
) -> None:
    """Write what `lora_kernel.expand_rows` writes."""
    largest = sums.shape[2] // len(ys)
    assert sums.shape == (SPLITS, len(x), len(ys) * largest)
    assert len(ys) == len(offsets)
    for rows, rank, slot in tiles(table, most, len(x)):
        for module, (y, offset) in enumerate(zip(ys, offsets, strict=True)):
            assert y.is_contiguous()
            assert len(y) == len(x)
            b = matrix(slot, offset, rank, aligned(y.shape[1]), x.dtype)[:, : y.shape[1]]
            low = sums[:, rows, module * largest : module * largest + rank].sum(0).to(x.dtype)
            y[rows] = (y[rows].float() + low.float() @ b.float()).to(y.dtype)


def tiles(table: torch.Tensor, most: int, rows: int) -> Iterator[tuple[slice, int, int]]:
    """Yield the rows, rank and slot address of each tile."""
    assert table.dtype == torch.int64
    assert table.is_contiguous()
    count = int(table[0, 0])
    assert 0 <= count <= most < len(table)
    end = 0
    for first, stop, rank, slot in table[1 : 1 + count].tolist():
        assert end <= first < stop <= rows
        assert rank % MIN_RANK == 0
        end = min(first + ROWS, stop)
        yield slice(first, end), rank, slot


def matrix(slot: int, offset: int, rank: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix `[rank, width]` of a slot on this host."""
    at = slot + offset * (rank // MIN_RANK) * dtype.itemsize
    assert at % 32 == 0
    memory: Any = (ctypes.c_uint8 * (rank * width * dtype.itemsize)).from_address(at)
    return torch.frombuffer(memory, dtype=dtype).view(rank, width)
