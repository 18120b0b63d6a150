"""LoRA of a decoder step by two kernels for all modules that read the same `x`: tables, torch ops, and their check.

The ops `cotrain::shrink_rows` and `cotrain::expand_rows` launch the kernels of `lora_programs.py`. One launch serves
all adapters, of any ranks and pools. Tile sizes follow from the model alone, never from measured times, so that two
workers have the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from cotrain_workers.engine.decoding.slot_pool import MIN_RANK, Pool, Slot, slot_layout
from cotrain_workers.engine.decoding.step import RowLora, adapter_rows
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.fused.operators import missing_kernels, no_result, register
from cotrain_workers.engine.lora.fused.tables import MODULES, Tiles, plan_groups
from cotrain_workers.engine.lora.quantized import FrozenWeight, dense
from cotrain_workers.engine.lora.siblings import SiblingResults
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.model.kernel_check import agrees
from cotrain_workers.engine.routing import LinearWeights
from cotrain_workers.engine.spec import Family, Target

#: Rows of a tile and LoRA columns of a product: the least that tensor cores take.
ROWS, RANKS = 16, 16
#: Parts of the depth of `x A^T`. Few tiles would not fill a GPU otherwise.
SPLITS = 8
#: Programs that a launch has at most: several for each multiprocessor of a GPU.
PROGRAMS = 1024
#: Outputs from which modules are wide.
WIDE = 1024
TYPES = (torch.bfloat16, torch.float16, torch.float32)
FAMILIES: tuple[Family, ...] = ("attn", "mlp", "unembed")
#: Relative to the largest value. In 16 bits the kernel rounds the sum of the base model's product and LoRA's once.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
CHECKED_RANKS = (8, 20)  # one block of ranks, and two

log = logging.getLogger(__name__)


class Siblings(NamedTuple):
    """Modules that read the same `x`, and the offsets of their matrices in a slot of rank 8."""

    targets: Sequence[Target]
    of_a: Sequence[int]
    of_b: Sequence[int]


def siblings_of(targets: Sequence[Target]) -> Iterator[Siblings]:
    """Yield the linear modules that read the same `x` together, and the unembedding."""
    layout = slot_layout(targets, MIN_RANK)
    names = [group.names for group in plan_groups(targets) if not group.experts]
    for own in (*names, (UNEMBED,)):
        if own[0] in layout.target_by_name:
            of_a, of_b = zip(*(layout.offset_by_name[name] for name in own), strict=True)
            yield Siblings([layout.target_by_name[name] for name in own], of_a, of_b)


@dataclass(frozen=True)
class LoraTables:
    """Adapters of the rows of a step. Those that do not train a family have no tile in it."""

    tiles: torch.Tensor  # int64 [families, 1 + n, 4]; see `lora_programs.py`
    most: Sequence[int]  # bound of the number of tiles, by family
    largest: int  # bound of the ranks


def tile_rows(slots: Sequence[Slot | None]) -> list[list[tuple[int, int, int, int]]]:
    """Return first row, end of the adapter's rows, rank and slot address of the tiles of each family.

    `slots` are the adapters of rows that are sorted by adapter.
    """
    tiles: list[list[tuple[int, int, int, int]]] = [[] for _ in FAMILIES]
    for start, stop, slot in adapter_rows(slots):
        rest = (stop, slot.pool.layout.rank, slot.address)
        own = [(first, *rest) for first in range(start, stop, ROWS)]
        for family, found in zip(FAMILIES, tiles, strict=True):
            if family in slot.families:
                found += own
    return tiles


def write_tiles(to: np.ndarray, tiles: Sequence[Sequence[tuple[int, int, int, int]]]) -> None:
    """Write tiles to the table `to`, int64 `[families, 1 + n, 4]`."""
    for own, found in zip(to, tiles, strict=True):
        own[0, 0] = len(found)
        if found:
            own[1 : 1 + len(found)] = found


def lora_tables(slots: Sequence[Slot | None], device: torch.device) -> LoraTables:
    """Return the tables of a step whose rows are sorted by adapter."""
    tiles = tile_rows(slots)
    most = [len(found) for found in tiles]
    table = np.zeros((len(FAMILIES), 1 + max(most), 4), np.int64)
    write_tiles(table, tiles)
    largest = max((slot.pool.layout.rank for slot in slots if slot is not None), default=0)
    return LoraTables(to_device(table, device), most, largest)


class KernelLora:
    """LoRA of a step with two launches for all modules that read the same `x`."""

    def __init__(
        self, siblings: Mapping[str, Siblings], linears: Mapping[str, LinearWeights], tables: LoraTables
    ) -> None:
        self._siblings = siblings
        self._linears = linears
        self._tables = tables
        self._outputs = SiblingResults[torch.Tensor]()

    def linear(
        self,
        module: str,
        x: torch.Tensor,
        weight: FrozenWeight,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map `x` `[1, T, in]` to `[1, T, out]`; the first sibling computes the outputs of all.

        The result of a module without siblings is added to `residual`, in its memory.
        """
        return self._outputs.take(module, x, lambda: self._together(self._siblings[module], x, residual))

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place; `module` has no siblings."""
        add_lora(self._siblings[module], self._tables, x, [y])

    def _together(self, own: Siblings, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, torch.Tensor]:
        linears = [self._linears[target.name] for target in own.targets]
        ys = [product(x, dense(each.weight), each.bias, residual) for each in linears]
        add_lora(own, self._tables, x[0], [y[0] for y in ys])
        return {target.name: y for target, y in zip(own.targets, ys, strict=True)}


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Return `x W^T + b` of `x` `[1, T, in]`, or `residual` after it was added there."""
    if residual is None:
        return functional.linear(x, weight, bias)
    if bias is not None:
        residual += bias
    residual[0].addmm_(x[0], weight.t())
    return residual


def add_lora(own: Siblings, tables: LoraTables, x: torch.Tensor, ys: Sequence[torch.Tensor]) -> None:
    """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]` of each sibling, in place."""
    family = FAMILIES.index(own.targets[0].family)
    most, tiles = tables.most[family], tables.tiles[family]
    if most:
        sums = shrink(x, tiles, most, tables.largest, own.of_a)
        expand(x, sums, ys, tiles, most, own.of_b)


_SCHEMAS = {
    # fp32 [SPLITS, T, modules * largest]: parts of x A^T. `offsets`: of the A of each module, in a slot of rank 8.
    "shrink_rows": "(Tensor x, Tensor tiles, int most, int largest, int[] offsets) -> Tensor",
    # Adds to `ys`. `offsets`: of the B of each module.
    "expand_rows": "(Tensor x, Tensor sums, Tensor(a!)[] ys, Tensor tiles, int most, int[] offsets) -> ()",
}


def shrink_rows(x: torch.Tensor, tiles: torch.Tensor, most: int, largest: int, offsets: Sequence[int]) -> torch.Tensor:
    """Return the parts of `x A^T` of each module, fp32 `[SPLITS, T, modules * largest]`; other rows are undefined."""
    x = x if x.stride(1) == 1 else x.contiguous()
    sums, count = _new_sums(x, tiles, most, largest, offsets), len(offsets)
    size = shrink_tiles(x.element_size())
    _programs().shrink_rows[(min(PROGRAMS, most * SPLITS * count),)](
        x, sums, tiles, x.stride(0), x.shape[1], len(x), largest, *_three(offsets), BK=size.depth,
        **constants(count, size),
    )  # fmt: skip
    return sums


def expand_rows(
    x: torch.Tensor,
    sums: torch.Tensor,
    ys: Sequence[torch.Tensor],
    tiles: torch.Tensor,
    most: int,
    offsets: Sequence[int],
) -> None:
    """Add `x A^T B^T` to `y` `[T, out]` of each module, given the parts of `x A^T`."""
    assert all(y.is_contiguous() for y in ys)
    widths = [y.shape[1] for y in ys]
    size = expand_tiles(widths)
    blocks = sum(-(-width // size.columns) for width in widths)
    _programs().expand_rows[(min(PROGRAMS, most * blocks),)](
        x, sums, *_three(ys), tiles, len(x), sums.shape[2] // len(ys), blocks, *_three(widths), *_three(offsets),
        BN=size.columns, **constants(len(ys), size),
    )  # fmt: skip


def shrink_tiles(item: int) -> Tiles:
    """Return the tiles of `x A^T` for values of `item` bytes: four of them in flight fill a GPU's memory channels."""
    return Tiles(RANKS, 256 // item, warps=4, stages=4)


def expand_tiles(widths: Sequence[int]) -> Tiles:
    """Return the tiles of products with B for modules with outputs of these widths.

    Most adapters need one product for a tile, so nothing is copied ahead.
    """
    return Tiles(256, RANKS, warps=8, stages=1) if max(widths) >= WIDE else Tiles(64, RANKS, warps=4, stages=1)


def constants(modules: int, size: Tiles) -> dict[str, Any]:
    """Return the constants that both kernels have."""
    tile = {"MODULES": modules, "SPLITS": SPLITS, "WIDE": _programs().INTERPRETED, "M": ROWS, "R": RANKS}
    return {**tile, "num_warps": size.warps, "num_stages": size.stages}


def _three(given: Sequence[Any]) -> list[Any]:
    return [*given, *[given[0]] * (MODULES - len(given))]


def _programs() -> Any:
    """Return the module of the kernels, which imports Triton."""
    from cotrain_workers.engine.decoding import lora_programs

    return lora_programs


def _new_sums(x: torch.Tensor, _tiles: Any, _most: int, largest: int, offsets: Sequence[int]) -> torch.Tensor:
    return x.new_empty(SPLITS, len(x), len(offsets) * largest, dtype=torch.float32)


register(_SCHEMAS, [shrink_rows, expand_rows], [_new_sums, no_result])
#: The functions as ops, which tools that follow ops can see.
shrink, expand = torch.ops.cotrain.shrink_rows, torch.ops.cotrain.expand_rows


def lora_kernel_takes(weight: torch.Tensor) -> bool:
    """Return True if the kernels can run for a model with this unembedding.

    On CUDA, a negative result is logged with its reason.
    """
    if not weight.is_cuda:
        return False
    reason = f"no kernels for {weight.dtype}" if weight.dtype not in TYPES else missing_kernels(weight.device)
    if reason:
        log.warning("LoRA in decoding is slow here: %s", reason)
    return not reason


def lora_kernel_is_right(targets: Sequence[Target], device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernels match the plain products for a model's modules; a failure or a mismatch is logged.

    Modules of equal sizes are compared once. Raises DeviceLost.
    """
    by_sizes = {tuple((each.inputs, each.outputs) for each in own.targets): own for own in siblings_of(targets)}

    def measure() -> float:
        return max((difference(own.targets, device, dtype) for own in by_sizes.values()), default=0.0)

    what = "The LoRA kernel of decoding, without which decoding is slow,"
    return agrees(what, device, TOLERANCE[dtype], measure)


@torch.no_grad()
def difference(targets: Sequence[Target], device: torch.device, dtype: torch.dtype) -> float:
    """Return the maximum difference from plain products in fp32, relative to the largest value.

    Generated tokens of two adapters of one rank, a prompt of a third one of another rank, and rows without an adapter
    are computed together.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    (own,) = siblings_of(targets)
    names = frozenset(target.name for target in targets)
    layouts = [slot_layout(targets, rank) for rank in CHECKED_RANKS]
    flats = [random(2, layout.size) for layout in layouts]

    def rows_in(kind: torch.dtype) -> list[Slot | None]:
        pools = [Pool(layout, flat.to(kind)) for layout, flat in zip(layouts, flats, strict=True)]
        first, second, third = Slot(pools[0], 0, names), Slot(pools[0], 1, names), Slot(pools[1], 1, names)
        return [None, first, second, second, *[third] * (ROWS + 3), None]

    rows, plain = rows_in(dtype), RowLora(rows_in(torch.float32), device)
    x = random(len(rows), targets[0].inputs) / targets[0].inputs ** 0.5
    kinds = [torch.float32 if target.name == UNEMBED else dtype for target in targets]
    ys = [random(len(rows), target.outputs).to(kind) for target, kind in zip(targets, kinds, strict=True)]
    expected = [y.to(torch.float32, copy=True) for y in ys]
    for target, y in zip(targets, expected, strict=True):
        plain.add(target.name, x.float(), y)
    add_lora(own, lora_tables(rows, device), x, ys)
    return max(float((y - theirs).abs().max() / theirs.abs().max()) for y, theirs in zip(ys, expected, strict=True))
