"""Ops into packed micro-batches: cut into pieces, put the pieces into bins, pad each bin to a bucket.

Where an op is cut depends on the op alone, so its sums do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from cotrain_workers.engine.sequence_table import bucket, up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class Piece:
    """A range of one op's datums; it becomes one segment of the packed row.

    It is cut again only where memory cannot hold it.
    """

    owner: int  # place of its pass in the wave
    first: int  # datum
    last: int  # one past
    tokens: int
    needs_grad: bool

    def halves(self, lengths: Sequence[int]) -> tuple[Piece, Piece]:
        """Cut at the datum nearest to the middle; `lengths` are of its datums, at least two."""
        sums = [sum(lengths[:at]) for at in range(1, len(lengths))]
        at = min(range(len(sums)), key=lambda place: abs(2 * sums[place] - self.tokens))
        middle = self.first + at + 1
        return (
            replace(self, last=middle, tokens=sums[at]),
            replace(self, first=middle, tokens=self.tokens - sums[at]),
        )


@dataclass(frozen=True)
class MicroBatch:
    """Pieces that run together, each from a row that is a multiple of `align`."""

    pieces: tuple[Piece, ...]
    align: int = 1

    @property
    def tokens(self) -> int:
        """Return the number of rows that carry a tenant's token."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def padded_tokens(self) -> int:
        """Return the number of rows with the filler sequences."""
        return bucket(sum(up_to(piece.tokens, self.align) for piece in self.pieces))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return the first row of each piece, and the one past its last token."""
        ends = accumulate((up_to(p.tokens, self.align) for p in self.pieces), initial=0)
        return [(start, start + p.tokens) for start, p in zip(ends, self.pieces, strict=False)]

    @property
    def needs_grad(self) -> bool:
        """Return whether anything is to be differentiated."""
        return any(piece.needs_grad for piece in self.pieces)

    def halves(self) -> tuple[MicroBatch, MicroBatch]:
        """Return the two halves, in order; there are at least two pieces."""
        middle = len(self.pieces) // 2
        return (
            replace(self, pieces=self.pieces[:middle]),
            replace(self, pieces=self.pieces[middle:]),
        )

    def without(self, owner: int) -> MicroBatch:
        """Return the same without the pieces of one op."""
        left = tuple(piece for piece in self.pieces if piece.owner != owner)
        return replace(self, pieces=left)

    def ordered(self, key: Callable[[Piece], Any]) -> MicroBatch:
        """Return the same with its pieces sorted; those of equal keys keep their order."""
        return replace(self, pieces=tuple(sorted(self.pieces, key=key)))


def cut(
    owner: int, lengths: Sequence[int], columns: Sequence[int], limit: int, *, needs_grad: bool
) -> Iterator[Piece]:
    """Cut an op at datum boundaries into pieces of at most `limit` tokens and one column count.

    `columns` holds each datum's number of targets per token. A datum longer than `limit` is a piece.
    """
    first, tokens = 0, 0
    for at, length in enumerate(lengths):
        if at > first and (tokens + length > limit or columns[at] != columns[first]):
            yield Piece(owner, first, at, tokens, needs_grad)
            first, tokens = at, 0
        tokens += length
    if tokens:
        yield Piece(owner, first, len(lengths), tokens, needs_grad)


def fill(pieces: Sequence[Piece], limit: int, align: int = 1) -> list[MicroBatch]:
    """Put pieces, in order, into micro-batches of at most `limit` rows; forward-only pieces go last."""
    in_order = [p for p in pieces if p.needs_grad] + [p for p in pieces if not p.needs_grad]
    batches: list[MicroBatch] = []
    current: list[Piece] = []
    rows = 0
    for piece in in_order:
        more = up_to(piece.tokens, align)
        if current and rows + more > limit:
            batches.append(MicroBatch(tuple(current), align))
            current, rows = [], 0
        current.append(piece)
        rows += more
    if current:
        batches.append(MicroBatch(tuple(current), align))
    return batches
