"""Packing of ops into micro-batches: cut into slices, fill bins with slices, pad each bin to a
bucket.

The cuts of an op depend on the op alone, so its sums do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from cotrain_workers.engine.routing import bucket, up_to
from cotrain_workers.engine.training.shared_prompts import rows_of


@dataclass(frozen=True)
class OpSlice:
    """Range of one op's datums; it becomes one segment of the packed row.

    It is cut again only if memory cannot hold it.
    """

    owner: int  # index of its pass among those that run
    first: int  # datum
    last: int  # one past
    tokens: int  # rows, fewer than the tokens of its datums if those share prompts
    needs_grad: bool

    def halves(self, lengths: Sequence[int], shared: Sequence[int] = ()) -> tuple[OpSlice, OpSlice]:
        """Cut at the datum nearest to the middle; `lengths` and `shared` are of its datums, at least two."""
        sums = [rows_of(lengths[:at], shared[:at]) for at in range(1, len(lengths))]
        at = min(range(len(sums)), key=lambda index: abs(2 * sums[index] - self.tokens)) + 1
        middle = self.first + at
        return (
            replace(self, last=middle, tokens=sums[at - 1]),
            replace(self, first=middle, tokens=rows_of(lengths[at:], shared[at:])),
        )


@dataclass(frozen=True)
class MicroBatch:
    """Slices that run together, each from a row that is a multiple of `align`."""

    op_slices: tuple[OpSlice, ...]
    align: int = 1
    tokens: int = field(init=False)  # rows with a tenant's token
    padded_tokens: int = field(init=False)  # rows including the filler sequences
    spans: Sequence[tuple[int, int]] = field(init=False)
    """First row of each slice, and the row after its last token."""
    needs_grad: bool = field(init=False)  # True if a slice needs a gradient

    def __post_init__(self) -> None:
        *starts, rows = accumulate((up_to(p.tokens, self.align) for p in self.op_slices), initial=0)
        vars(self).update(  # the class is frozen; these are read often
            tokens=sum(p.tokens for p in self.op_slices),
            padded_tokens=bucket(rows),
            spans=[(at, at + p.tokens) for at, p in zip(starts, self.op_slices, strict=True)],
            needs_grad=any(p.needs_grad for p in self.op_slices),
        )

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Return the two halves, in order; there are at least two slices."""
        middle = len(self.op_slices) // 2
        return (replace(self, op_slices=self.op_slices[:middle]), replace(self, op_slices=self.op_slices[middle:]))

    def without(self, owner: int) -> MicroBatch:
        """Return the same without the slices of one op."""
        left = tuple(op_slice for op_slice in self.op_slices if op_slice.owner != owner)
        return replace(self, op_slices=left)


@dataclass
class PassesCost:
    """Cost of the passes of a cycle."""

    forwards: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0  # without the time at yield points
    halvings: int = 0  # of micro-batches that did not fit into memory
    cut_slices: int = 0  # among those; such an op has other last bits than with more memory


def cut(
    owner: int,
    lengths: Sequence[int],
    columns: Sequence[int],
    limit: int,
    *,
    needs_grad: bool,
    shared: Sequence[int] = (),
) -> Iterator[OpSlice]:
    """Cut an op at datum boundaries into slices of at most `limit` rows and one column count.

    `columns` holds each datum's number of targets per token, and `shared` its tokens whose rows may belong to an earlier
    datum (`shared_prompts.py`). A datum longer than `limit` is a slice.
    """
    first, tokens = 0, 0
    for at, length in enumerate(lengths):
        more = length - shared[at] if shared else length
        if at > first and (tokens + more > limit or columns[at] != columns[first]):
            yield OpSlice(owner, first, at, tokens, needs_grad)
            first, tokens = at, 0
        tokens += length if at == first else more
    if tokens:
        yield OpSlice(owner, first, len(lengths), tokens, needs_grad)


def of_one_kind(op_slices: Sequence[OpSlice]) -> list[list[OpSlice]]:
    """Split slices by the need of a gradient; the kind of the first slice is first."""
    kinds = dict.fromkeys(op_slice.needs_grad for op_slice in op_slices)
    return [[each for each in op_slices if each.needs_grad == kind] for kind in kinds]


def fill(
    op_slices: Sequence[OpSlice], limit: int, align: int = 1, order_by_owner: Sequence[Any] | None = None
) -> list[MicroBatch]:
    """Put slices, in order, into micro-batches of at most `limit` rows; forward-only slices go
    last.

    Each micro-batch is sorted by the owners' keys in `order_by_owner`; equals keep their order.
    """
    in_order = [p for p in op_slices if p.needs_grad] + [p for p in op_slices if not p.needs_grad]
    bins: list[list[OpSlice]] = []
    rows = 0
    for op_slice in in_order:
        more = up_to(op_slice.tokens, align)
        if not bins or rows + more > limit:
            bins.append([])
            rows = 0
        bins[-1].append(op_slice)
        rows += more
    if order_by_owner is not None:
        for each in bins:
            each.sort(key=lambda op_slice: order_by_owner[op_slice.owner])
    return [MicroBatch(tuple(each), align) for each in bins]
