"""How large the tiles of each kernel are: a table, so that one problem has the same bits everywhere.

Nothing is timed to choose them. What a size depends on is the model and the number of modules that read one
`x`, never the rows of a micro-batch, nor the rank of an adapter that is not the tile's own.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 128  # of a tile; each belongs to one adapter, and begins at a multiple of this from its segment's start
RANK = 16  # columns of LoRA that one product takes: the least that a tensor core does
MODULES = 3  # that read one `x`, at most: q, k and v


class Expand(NamedTuple):
    """Of the products with the base model's weights."""

    columns: int
    depth: int
    warps: int
    stages: int


class Narrow(NamedTuple):
    """Of the products with a LoRA matrix alone."""

    columns: int  # of LoRA
    depth: int  # of what they are multiplied with
    warps: int
    stages: int


#: Widths above which the wider tiles are filled.
_WIDE = 1024


def expand_tiles(width: int) -> Expand:
    """Return the tiles of a product whose widest result has `width` columns."""
    return Expand(128, 64, 8, 3) if width >= _WIDE else Expand(64, 64, 4, 2)


def narrow_tiles(modules: int, width: int) -> Narrow:
    """Return the tiles for `modules` whose LoRA columns lie next to each other, over `width` values at most."""
    columns = {1: RANK, 2: 2 * RANK, 3: 4 * RANK}[modules]
    return Narrow(columns, 128, 4, 3) if width >= _WIDE else Narrow(columns, 128, 4, 2)
