"""How large the tiles of each kernel are: a table, so that one problem has the same bits everywhere.

Nothing is timed to choose them. What a size depends on is the model and the number of modules that read one
`x`, never the rows of a micro-batch, nor the rank of an adapter that is not the tile's own.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 128  # of a tile; each belongs to one adapter, and begins at a multiple of this from its segment's start
RANK = 16  # columns of LoRA that one product takes: the least that a tensor core does
MODULES = 3  # that read one `x`, at most: q, k and v


class Tiles(NamedTuple):
    """Of one kernel: columns of the result, values summed at a time, and what Triton calls warps and stages."""

    columns: int
    depth: int
    warps: int
    stages: int


#: Widths from which on the wider tiles are filled.
_WIDE = 1024


def expand_tiles(width: int, item: int) -> Tiles:
    """Return those of products with the base model's weights, whose widest result has `width` columns.

    Values are of `item` bytes: three stages of a tile fit into the shared memory of an A100 (163 KB) in each type.
    """
    return Tiles(128, 128 // item, 8, 3) if width >= _WIDE else Tiles(64, 256 // item, 4, 2)


def narrow_tiles(modules: int, width: int, item: int) -> Tiles:
    """Return those of products with LoRA matrices alone, of `modules` whose columns lie next to each other.

    `width` is the most values that they are multiplied with.
    """
    columns, warps = {1: (RANK, 4), 2: (2 * RANK, 8), 3: (4 * RANK, 8)}[modules]
    return Tiles(columns, 256 // item, warps, 3) if width >= _WIDE else Tiles(columns, 128, 4, 2)
