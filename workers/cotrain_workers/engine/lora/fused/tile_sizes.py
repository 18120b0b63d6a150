"""Tile sizes of each kernel, in a fixed table, so that one problem has the same bits everywhere.

Sizes are not chosen by timing. They depend on the model and on the number of modules that read the same `x`,
never on the rows of a micro-batch or on the rank of another adapter.
"""

from typing import NamedTuple

ROWS = 128  # rows of a tile; a tile belongs to one adapter and starts at a multiple of this in its segment
RANK = 16  # LoRA columns per product: the minimum of a tensor core
MODULES = 3  # maximum number of modules that read the same `x`: q, k and v


SHRINK_ROWS = 64  # rows of one program of a product with LoRA matrices only
TOKENS = 128  # rows of one product of a weight gradient
EXPERT_PARTS = 4  # programs that share the rows of an adapter in an expert
SUM_COLUMNS = 1024  # columns of a program that adds the experts of a token
#: LoRA columns of a tile, by the number of modules with adjacent columns.
LOW_COLUMNS = {1: RANK, 2: 2 * RANK, 3: 4 * RANK}


class Tiles(NamedTuple):
    """Tile of one kernel: result columns, depth of one partial sum, and Triton's warps and stages."""

    columns: int
    depth: int
    warps: int
    stages: int


#: Minimum width that fills the wider tiles.
_WIDE = 1024


def expand_tiles(width: int, item: int, *, tma: bool = False, gated: bool = False) -> Tiles:
    """Return the tiles of products with the base model's weights; the widest result has `width` columns.

    Values have `item` bytes. `gated` products hold a second tile of values, in registers or in shared memory.
    Measured on an H200 with the products of an 8B model (docs/adr/0035).
    """
    if width < _WIDE:
        return Tiles(64, 128 if item == 2 else 16, 4, 2)
    if tma:
        return Tiles(128, 64, 8, 3) if gated else Tiles(256, 64, 8, 4)
    # Three stages fit into the shared memory of an A100 (163 KB). A product of fp32 is unrolled by its depth, and
    # deeper ones take a minute to compile.
    return Tiles(128, 64 if item == 2 else 16, 8, 3)


def expert_tiles(width: int, item: int, *, tma: bool = False) -> Tiles:
    """Return the tiles of products with the weights of experts, like `expand_tiles`.

    LoRA of one adapter after the other needs a second tile of values, so there are none of 256 columns.
    """
    return expand_tiles(_WIDE if width >= _WIDE // 2 else width, item, tma=tma, gated=True)


def shrink_tiles(modules: int, width: int, item: int) -> Tiles:
    """Return the tiles of products with LoRA matrices, for `modules` with adjacent columns.

    `width` is the largest length of the summed dimension.
    """
    columns = LOW_COLUMNS[modules]
    return Tiles(columns, 256 // item, 4, 4) if width >= _WIDE else Tiles(columns, 128, 4, 2)


def gradient_tiles(modules: int, width: int, item: int) -> Tiles:
    """Return the tiles of weight gradients; `depth` is their number of columns, of the largest `width`."""
    columns = LOW_COLUMNS[modules]
    return Tiles(columns, 128 // item, 4, 3) if width >= _WIDE else Tiles(columns, 128, 4, 2)
