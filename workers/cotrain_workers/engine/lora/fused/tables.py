"""Tiles of the fused kernels: their sizes, the adapter of each, and addresses of its matrices and gradients.

Sizes come from a fixed table and not from timing, so that one problem has the same bits everywhere. They depend on the
model and on the number of modules that read the same `x`, never on the rows of a micro-batch or on the rank of another
adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.siblings import shared_input
from cotrain_workers.engine.routing import Segment
from cotrain_workers.engine.spec import Layout, Pair, Target, lay_out_matrices

ROWS = 128  # rows of a tile; a tile belongs to one adapter and starts at a multiple of this in its segment
RANK = 16  # LoRA columns per product: the minimum of a tensor core
MODULES = 3  # maximum number of modules that read the same `x`: q, k and v
SHRINK_ROWS = 64  # rows of one program of a product with LoRA matrices only
TOKENS = 128  # rows of one product of a weight gradient
EXPERT_PARTS = 4  # programs that share the rows of an adapter in an expert
SUM_COLUMNS = 1024  # columns of a program that adds the experts of a token
#: LoRA columns of a tile, by the number of modules with adjacent columns.
LOW_COLUMNS = {1: RANK, 2: 2 * RANK, 3: 4 * RANK}
#: Minimum width that fills the wider tiles.
_WIDE = 1024

HEAD = 4  # rank, address of the weights, address of the gradient, flags of experts
WEIGHTS, GRADIENT, FLAGS = 1, 2, 3
A, B = 0, 1  # side: the matrix of an adapter. Its flag is set if each expert has one of its own.
BOTH = 1 << A | 1 << B


@dataclass(frozen=True)
class ModuleGroup:
    """Modules that read the same `x`, in the order of the model."""

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    at: int  # first column of the group in a row of entries
    experts: int = 0

    @property
    def outer(self) -> int:
        """Side of the matrix that experts share, unless it comes from an upload."""
        return A if len(self.names) > 1 else B

    @property
    def of_tokens(self) -> ModuleGroup:
        """The same modules of experts for the adapters whose outer matrix is shared."""
        return replace(self, at=self.at + self.width, experts=0)

    @property
    def width(self) -> int:
        """Number of columns of the group; even, so that each group is aligned to 16 bytes."""
        return HEAD + 2 * len(self.names)


@dataclass(frozen=True)
class Tables:
    """Tables of one micro-batch, on the device. Row `segments` of entries and scales stands for no adapter."""

    tiles: torch.Tensor  # int32 [tiles, 3]: segment, first row, end row of the segment
    spans: torch.Tensor  # int32 [segments, 2]: first row, end row
    owners: torch.Tensor  # int32 [gradients + 1]: start of each gradient's segments in `members`
    members: torch.Tensor  # int32: segments that need a gradient, grouped by gradient, in order
    scales: torch.Tensor  # fp32 [segments + 1]
    entries: torch.Tensor  # int64 [segments + 1, all columns of all groups]
    ranks: np.ndarray  # on the host, maximum of each column of `entries`; valid for ranks and flags

    def of(self, group: ModuleGroup) -> torch.Tensor:
        """Return the entries `[segments + 1, width]` of a group."""
        return self.entries[:, group.at : group.at + group.width]

    def columns(self, group: ModuleGroup) -> int:
        """Return the number of LoRA columns of a group for its largest rank; 0 if no adapter trains it."""
        return -(-int(self.ranks[group.at]) * len(group.names) // RANK) * RANK

    def has_own(self, group: ModuleGroup) -> bool:
        """Return True if an adapter has the outer matrix for each expert."""
        return bool(self.ranks[group.at + FLAGS] == BOTH)


def plan_groups(targets: Sequence[Target]) -> tuple[ModuleGroup, ...]:
    """Return the groups of modules that read the same `x`, without the unembedding."""
    groups, end = [], 0
    linear = (target for target in targets if target.family != "unembed")
    for _, same in groupby(linear, key=shared_input):
        together = list(same)
        assert len(together) <= MODULES
        group = ModuleGroup(
            tuple(target.name for target in together),
            tuple(target.outputs for target in together),
            end,
            together[0].experts,
        )
        end += group.width * (2 if group.experts else 1)  # of experts: `of_tokens` follows
        groups.append(group)
    return tuple(groups)


def make_tables(segments: Sequence[Segment], rows: int, groups: Sequence[ModuleGroup], device: torch.device) -> Tables:
    """Return the tables of a packed row of `rows`."""
    spans = [(segment.start, segment.stop) for segment in segments]
    owners, members = find_owners(segments)
    scales = [*(segment.scale for segment in segments), 0.0]
    entries = find_entries(segments, tuple(groups))
    return Tables(
        tiles=to_device(np.array(find_tiles(spans, rows), np.int32), device),
        spans=to_device(np.array(spans, np.int32), device),
        owners=to_device(np.array(owners, np.int32), device),
        members=to_device(np.array(members, np.int32), device),
        scales=to_device(np.array(scales, np.float32), device),
        entries=to_device(entries, device),
        ranks=entries.max(axis=0),
    )


def find_tiles(spans: Sequence[tuple[int, int]], rows: int) -> list[tuple[int, int, int]]:
    """Return the tiles of all segments and of the rows between and after them, each from its own first row."""
    tiles, end = [], 0
    for number, (start, stop) in [*enumerate(spans), (len(spans), (rows, rows))]:
        tiles += [(len(spans), first, start) for first in range(end, start, ROWS)]
        tiles += [(number, first, stop) for first in range(start, stop, ROWS)]
        end = stop
    return tiles


def find_owners(segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """Return the segments that need a gradient, grouped by gradient: start of each group, and members."""
    by_gradient: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        if segment.grads is not None:
            by_gradient.setdefault(id(segment.grads), []).append(number)
    ends, members = [0], []
    for own in by_gradient.values():
        members += own
        ends.append(len(members))
    return ends, members


def find_entries(segments: Sequence[Segment], groups: tuple[ModuleGroup, ...]) -> np.ndarray:
    """Return rank, addresses and offsets of each segment's adapter for every group."""
    groups += tuple(group.of_tokens for group in groups if group.experts)
    entries = np.zeros((len(segments) + 1, max(each.at + each.width for each in groups)), np.int64)
    starts = np.array([group.at for group in groups])
    for row, segment in zip(entries, segments, strict=False):
        layout = segment.source.layout
        row[:] = offsets_of(layout.rank, layout.targets, groups)
        row[starts + WEIGHTS] = address_of(segment.source.compute, layout)
        row[starts + GRADIENT] = address_of(segment.grads or {}, layout)
    return entries


@cache
def offsets_of(rank: int, targets: tuple[Target, ...], groups: tuple[ModuleGroup, ...]) -> np.ndarray:
    """Return a row of entries without addresses, for adapters of one rank on these targets."""
    offset_by_name = lay_out_matrices(rank, targets)[0]
    target_by_name = {target.name: target for target in targets}
    row = np.zeros(max(group.at + group.width for group in groups), np.int64)
    for group in groups:
        target = target_by_name.get(group.names[0])
        if target is None:
            continue
        flags = (target.experts_a > 1) << A | (target.experts_b > 1) << B
        if target.experts:
            flags |= 1 << (A + B - group.outer)
        is_of_tokens = target.experts and not group.experts
        if not is_of_tokens or flags != BOTH:
            row[group.at] = rank
        row[group.at + FLAGS] = 0 if is_of_tokens else flags
        offsets = [offset_by_name[name] for name in group.names]
        row[group.at + HEAD : group.at + group.width] = np.array(offsets).ravel()
    return row


def address_of(views: Mapping[str, Pair], layout: Layout) -> int:
    """Return the start address of the arena that contains `views`; 0 if there are none."""
    for name, pair in views.items():
        first: int = pair.a.data_ptr() - layout.offset_by_name[name][0] * pair.a.element_size()
        return first
    return 0


class Tiles(NamedTuple):
    """Tile of one kernel: result columns, depth of one partial sum, and Triton's warps and stages."""

    columns: int
    depth: int
    warps: int
    stages: int


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
