"""Gated delta rule of the sequences of a packed row, by blocks of rows.

A sequence is cut into blocks. Within a block the rule is a few products (Yang, Kautz, Hatamizadeh 2024, "Gated Delta
Networks"), computed for all blocks at once. Then the state passes from block to block, for all sequences at once. Mamba
2 is the same rule without a subtraction (Dao, Gu 2024).

No value of a sequence is multiplied into another one, and a product of a block has the same bits for every number of
blocks. So the bits of a run do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.device import to_device

BLOCK = 64  # rows, as in transformers
FEWEST = 8  # rows of the blocks of a short sequence


class Move(NamedTuple):
    """Source row of each row; a row without a source is zero."""

    source: torch.Tensor  # int64 [n]
    empty: torch.Tensor | None  # bool [n], or None if each has a source


def move_of(index: np.ndarray, device: torch.device) -> Move:
    """Return the move of source rows `index` int64 `[n]`, where -1 is none."""
    empty = index < 0
    found = to_device(empty, device) if empty.any() else None
    return Move(to_device(np.maximum(index, 0), device), found)


def moved(x: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the rows of `x` `[m, ...]` as `[n, ...]`."""
    found = x.index_select(0, move.source)
    if move.empty is not None:
        found.masked_fill_(move.empty.view(-1, *[1] * (x.dim() - 1)), 0)
    return found


class Moved(torch.autograd.Function):
    """Rows of `x` in another place, each at most once. Its backward adds nothing, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to: Move, back: Move) -> torch.Tensor:  # type: ignore[explicit-override]
        """Return the rows."""
        ctx.back = back
        return moved(x, to)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[explicit-override]
        """Return the gradient of `x`."""
        return moved(grads[0], ctx.back), None, None


class Run(NamedTuple):
    """Adjacent rows of one sequence, in parts that begin at a block."""

    row: int
    parts: Sequence[int]  # rows of each

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(self.parts)


@dataclass(frozen=True)
class Grid:
    """Blocks of one size: the first blocks of all runs, then the second ones, and so on; longest runs first."""

    size: int  # rows of a block
    counts: Sequence[int]  # of first blocks, second blocks and so on
    order: Sequence[int]  # number of the run of each first block
    ends: Sequence[int]  # last block of each part, run by run

    @property
    def rows(self) -> int:
        """Number of rows in all blocks."""
        return self.size * sum(self.counts)


@dataclass(frozen=True)
class Blocks:
    """Blocks of a packed row, grid by grid."""

    to: Move  # packed rows in blocks
    back: Move  # rows of blocks in the packed row, [T]
    grids: Sequence[Grid]


def size_for(run: Run) -> int:
    """Return the size of the blocks of a whole sequence. It depends on nothing else, as the bits do."""
    return max(FEWEST, min(BLOCK, 1 << (run.rows - 1).bit_length()))


def blocks_of(
    runs: Sequence[Run], rows: int, device: torch.device, size_of: Callable[[Run], int] = lambda _run: BLOCK
) -> Blocks:
    """Return the blocks of runs within a packed row of `rows`."""
    to, back = [], np.full(rows, -1)
    grids, begun = [], 0
    for size in sorted({size_of(run) for run in runs}):
        own = [run for run in runs if size_of(run) == size]
        grid, index = grid_of(own, size)
        filled = np.flatnonzero(index >= 0)
        back[index[filled]] = begun + filled
        begun += len(index)
        to.append(index)
        grids.append(grid)
    return Blocks(move_of(np.concatenate(to), device), move_of(back, device), grids)


def grid_of(runs: Sequence[Run], size: int) -> tuple[Grid, np.ndarray]:
    """Return the blocks of some runs, and the packed row of each of their rows; -1 is none."""
    cut = [[min(size, part - at) for part in run.parts for at in range(0, part, size)] for run in runs]
    order = sorted(range(len(runs)), key=lambda run: -len(cut[run]))
    counts = [sum(len(own) > depth for own in cut) for depth in range(max(map(len, cut)))]
    offsets = [0, *accumulate(counts)]
    index = np.full((offsets[-1], size), -1)
    ranks = {run: rank for rank, run in enumerate(order)}
    ends = []
    for number, run in enumerate(runs):
        row, ended = run.row, 0
        for depth, length in enumerate(cut[number]):
            index[offsets[depth] + ranks[number], :length] = np.arange(row, row + length)
            row += length
        for part in run.parts:
            ended += -(-part // size)
            ends.append(offsets[ended - 1] + ranks[number])
    return Grid(size, counts, order, ends), index.ravel()


def by_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    blocks: Blocks,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the outputs `[T, heads, d_v]`, and the states `[n, heads, d_k, d_v]` after the first, second … blocks,
    fp32.

    `q` and `k` are `[T, heads of keys, d_k]`, `v` is `[T, heads, d_v]`. The logarithmic decay `g` and the rates
    `beta` are `[T, heads]`; without rates, nothing is subtracted from `v`. `state` has the run of each first block.
    The states are those of the last grid.
    """
    sizes = [grid.rows for grid in blocks.grids]

    def cut(x: torch.Tensor) -> Sequence[torch.Tensor]:
        rows: torch.Tensor = Moved.apply(x.float(), blocks.to, blocks.back)  # type: ignore[no-untyped-call]  # torch gives it no types
        return rows.split(sizes) if len(sizes) > 1 else [rows]

    given = (q, k, v, g) if beta is None else (q, k, v, g, beta)
    outs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for grid, own in zip(blocks.grids, zip(*map(cut, given), strict=True), strict=True):
        out, states = in_grid(grid, *own, state=state)
        outs.append(out)
    rows: torch.Tensor = Moved.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        torch.cat(outs) if len(outs) > 1 else outs[0], blocks.back, blocks.to
    )
    return rows, states


def in_grid(
    grid: Grid,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the results of `by_blocks` for the rows of one grid."""
    heads, size = v.shape[1], grid.size

    def cut(x: torch.Tensor) -> torch.Tensor:  # [blocks, heads, size, ...]
        each = x.view(-1, size, *x.shape[1:]).transpose(1, 2).contiguous()
        groups = each.shape[1]
        if groups == heads:
            return each
        return each.unsqueeze(2).expand(-1, -1, heads // groups, *each.shape[2:]).flatten(1, 2)

    q, k, v, g = (cut(x) for x in (q, k, v, g))
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # Decay from one row to another: a sum of its own, because the difference of two long sums loses digits.
    # It is a product, because a cumulative sum of floats on CUDA has no fixed order.
    steps = g[..., None].expand(-1, -1, -1, size).masked_fill(~lower.tril(-1), 0)
    logs = lower.float().expand_as(steps) @ steps
    decays = logs.masked_fill(~lower, -torch.inf).exp()
    since = (logs[..., :1] + g[..., :1, None]).exp()  # the decay since the block began
    olds = None
    if beta is not None:
        rates = cut(beta)[..., None]
        system = (k * rates) @ k.mT * decays
        v, olds = (
            torch.linalg.solve_triangular(system, x, upper=False, unitriangular=True)
            for x in (v * rates, k * rates * since)
        )
    parts = [v, q * since, (k * decays[..., -1, :, None]).mT, q @ k.mT * decays, since[..., -1:, :]]
    if olds is not None:
        parts.append(olds)
    if state is None:
        state = q.new_zeros(grid.counts[0], heads, q.shape[-1], v.shape[-1])
    outs, states = [], []
    # Split once, because the backward of each slice would write zeros for all other blocks.
    for new, query, key, within, decay, *old in zip(*(x.split(grid.counts) for x in parts), strict=True):
        if len(new) < len(state):
            state = state[: len(new)]
        if old:
            new = new - old[0] @ state
        outs.append(query @ state + within @ new)
        state = state * decay + key @ new
        states.append(state)
    return torch.cat(outs).transpose(1, 2).flatten(0, 1), states


def by_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs `[n, heads, d_v]` of one token each, and the states after it `[n, heads, d_k, d_v]`, fp32.

    The arguments are those of `by_blocks`. No product of matrices is used, so bits do not depend on `n`.
    """
    heads = v.shape[1]
    q, k = (x.float().repeat_interleave(heads // x.shape[1], dim=1)[..., None] for x in (q, k))
    state = state * g.exp()[..., None, None]
    new = v.float()
    if beta is not None:
        new = (new - (state * k).sum(-2)) * beta.float()[..., None]
    state = state + k * new[..., None, :]
    return (state * q).sum(-2), state
