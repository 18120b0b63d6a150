"""Micro-batches: ops cut into slices, slices packed into batches, and the limits of their size. Pure.

The cuts of an op depend on the op alone, so its sums do not depend on its neighbours.

When a micro-batch runs out of memory, `after_oom` chooses the remedy, and `BatchLimits` makes the next ones smaller for
a while.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from cotrain_workers.engine.ops import Datum
from cotrain_workers.engine.routing import bucket

#: Tokens of a shorter prompt are computed again: each group takes more calls of the attention.
LEAST_SHARED = 64
#: Waves of passes without a failure after which lowered limits double. Each further failure doubles
#: the number, up to the second one. A retry costs at most one micro-batch.
FIRST_WAIT, LONGEST_WAIT = 16, 1024
#: Start and stop in the packed row, and True if the rows belong to an earlier datum.
Span = tuple[int, int, bool]


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
    """Slices that run together, one after the other in the packed row."""

    op_slices: tuple[OpSlice, ...]
    tokens: int = field(init=False)  # rows with a tenant's token
    padded_tokens: int = field(init=False)  # rows including the filler sequences
    spans: Sequence[tuple[int, int]] = field(init=False)  # first row of each slice, and the row after its last token
    needs_grad: bool = field(init=False)  # True if a slice needs a gradient

    def __post_init__(self) -> None:
        ends = list(accumulate((p.tokens for p in self.op_slices), initial=0))
        vars(self).update(  # the class is frozen; these are read often
            tokens=ends[-1],
            padded_tokens=bucket(ends[-1]),
            spans=list(pairwise(ends)),
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
    halvings: int = 0  # of micro-batches that did not fit into memory
    cut_slices: int = 0  # among those; such an op has other last bits than with more memory


def cut_op(
    owner: int,
    lengths: Sequence[int],
    columns: Sequence[int],
    limit: int,
    *,
    needs_grad: bool,
    shared: Sequence[int] = (),
) -> Iterator[OpSlice]:
    """Cut an op at datum boundaries into slices of at most `limit` rows and one column count.

    `columns` holds each datum's number of targets per token, and `shared` its tokens whose rows may belong to an
    earlier datum (`shared_prompts`). A datum longer than `limit` is a slice.
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


def fill(op_slices: Sequence[OpSlice], limit: int) -> list[MicroBatch]:
    """Put slices, in order, into micro-batches of at most `limit` rows; forward-only slices go last."""
    in_order = [p for p in op_slices if p.needs_grad] + [p for p in op_slices if not p.needs_grad]
    bins: list[list[OpSlice]] = []
    rows = 0
    for op_slice in in_order:
        if not bins or rows + op_slice.tokens > limit:
            bins.append([])
            rows = 0
        bins[-1].append(op_slice)
        rows += op_slice.tokens
    return [MicroBatch(tuple(each)) for each in bins]


def shared_prompts(datums: Sequence[Datum]) -> list[int]:
    """Return, for each datum, how many of its first tokens are those of the first datum of its group; 0 for that one.

    Groups are neighbours. A datum joins the group before it if more tokens are then saved in the group.

    The first datum of a group has all of its rows in the packed row. Each other one has only the rows after the prompt,
    whose queries attend to the prompt's keys and values of the first. So gradients of the prompt add up from all of
    them. The head still receives every row of every datum.
    """
    shared = [0] * len(datums)
    first, prompt = 0, 0
    for at in range(1, len(datums)):
        members = at - first
        may_share = min(len(datums[first].tokens), len(datums[at].tokens)) > LEAST_SHARED
        common = common_prompt(datums[first], datums[at]) if may_share else 0
        common = min(common, prompt) if members > 1 else common
        if common >= LEAST_SHARED and members * common > (members - 1) * prompt:
            prompt = common
            shared[first + 1 : at + 1] = [prompt] * members
        else:
            first, prompt = at, 0
    return shared


def common_prompt(one: Datum, other: Datum) -> int:
    """Return the number of equal first tokens with equal given experts; at least one token of each is left.

    Datums with images share nothing.
    """
    if one.images or other.images:
        return 0
    most = max(0, min(len(one.tokens), len(other.tokens)) - 1)
    differs = one.tokens[:most] != other.tokens[:most]
    experts, others = one.routed_experts, other.routed_experts
    if (experts is None) != (others is None):
        return 0
    if experts is not None and others is not None:
        both = min(most, len(experts), len(others))
        differs = differs[:both] | (experts[:both] != others[:both]).any(axis=(1, 2))
    return int(differs.argmax()) if differs.any() else len(differs)


def rows_of(lengths: Sequence[int], shared: Sequence[int]) -> int:
    """Return the rows of the datums of a slice. The first of them takes no rows of another one."""
    return sum(lengths) - sum(shared[1:])


def spans_of(start: int, lengths: Sequence[int], shared: Sequence[int]) -> list[Span]:
    """Return the rows of each datum of a slice that begins at row `start` of the packed row, in order."""
    spans: list[Span] = []
    first = at = start
    for number, (length, prompt) in enumerate(zip(lengths, shared, strict=True)):
        if number == 0 or not prompt:
            first, prompt = at, 0
        else:
            spans.append((first, first + prompt, True))
        spans.append((at, at + length - prompt, False))
        at += length - prompt
    return spans


@dataclass(frozen=True)
class Budget:
    """Limits of a micro-batch."""

    tokens: int
    keep_tokens: int  # number of tokens above which decoder layers are recomputed; 0: always
    longest_datum: int = 0  # tokens, if every adapter is offloaded; 0: not measured
    save_tokens: int = sys.maxsize
    """Tokens of a long datum above which layer inputs are on the host, and MLPs compute in chunks of rows."""


@dataclass
class BatchLimits:
    """Limits of micro-batches in use. They fall when memory runs out, and later return to the planned ones.

    No run's bits depend on them. They only decide which slices run together, and whether layers are recomputed.
    """

    planned: Budget
    tokens: int = field(init=False)
    keep_tokens: int = field(init=False)
    save_tokens: int = field(init=False)
    wait: int = 0  # waves without a failure until the limits double; 0 if memory has not run out recently
    _good: int = 0
    _has_failed: bool = False  # in this wave

    def __post_init__(self) -> None:
        self.tokens, self.keep_tokens = self.planned.tokens, self.planned.keep_tokens
        self.save_tokens = self.planned.save_tokens

    def recomputes(self, padded_tokens: int) -> bool:
        """Return True if a micro-batch of this size recomputes its decoder layers."""
        return padded_tokens > self.keep_tokens

    def saves_memory(self, tokens: int) -> bool:
        """Return True if a datum of this length has its layer inputs on the host, and its MLPs in chunks of rows."""
        return tokens > self.save_tokens

    def lower(self, *, tokens: int = sys.maxsize, keep_tokens: int = sys.maxsize) -> None:
        """Lower limits after a micro-batch ran out of memory."""
        self.tokens = min(self.tokens, tokens)
        self.keep_tokens = min(self.keep_tokens, keep_tokens)
        self._has_failed = True

    def lower_plan(self, *, tokens: int, keep_tokens: int = sys.maxsize) -> None:
        """Lower limits for good, because the next failure could end the process."""
        self.tokens = min(self.tokens, tokens)
        self.keep_tokens = min(self.keep_tokens, keep_tokens)
        most = self.planned
        self.planned = Budget(min(most.tokens, tokens), min(most.keep_tokens, keep_tokens))

    def end_wave(self) -> None:
        """Count a wave of passes; double lowered limits after enough waves without a failure."""
        if self._has_failed:
            self._has_failed, self._good = False, 0
            self.wait = min(2 * self.wait, LONGEST_WAIT) or FIRST_WAIT
            return
        self._good += 1
        if self._good < self.wait:
            return
        self._good = 0
        most = self.planned
        if (self.tokens, self.keep_tokens) == (most.tokens, most.keep_tokens):
            self.wait = 0
            return
        self.tokens = min(2 * self.tokens, most.tokens)
        # Keeping any micro-batch means no limit, which doubling would not reach.
        more = 2 * self.keep_tokens + 1
        self.keep_tokens = min(more, most.keep_tokens) if more < most.tokens else most.keep_tokens


@dataclass(frozen=True)
class Recompute:
    """Run the micro-batch again, with decoder layers recomputed in backward."""


@dataclass(frozen=True)
class SaveMemory:
    """Run the datum again, with layer inputs on the host and MLPs in chunks of rows."""


@dataclass(frozen=True)
class Fail:
    """Fail the op of the only datum, which has `tokens` tokens."""

    tokens: int


@dataclass(frozen=True)
class Split:
    """Run both halves, one after the other."""

    first: MicroBatch
    second: MicroBatch
    cuts_slice: bool  # True if a slice of an op was cut, which moves the last bits of the op's sums


def after_oom(
    batch: MicroBatch,
    lengths: Sequence[int],
    shared: Sequence[int] = (),
    *,
    can_recompute: bool,
    can_save: bool = False,
) -> Recompute | SaveMemory | Fail | Split:
    """Choose the remedy that loses least; `lengths` and `shared` are of the datums of the batch's first slice.

    While slices stay whole, the sums are the same to the bit. A slice that does not fit alone is recomputed in backward
    if possible, and only then cut at a datum.
    """
    op_slice, *others = batch.op_slices
    if others:
        return Split(*batch.halves(), cuts_slice=False)
    if can_recompute and op_slice.needs_grad:
        return Recompute()
    if len(lengths) == 1:
        return SaveMemory() if can_save else Fail(op_slice.tokens)
    first, second = (replace(batch, op_slices=(half,)) for half in op_slice.halves(lengths, shared))
    return Split(first, second, cuts_slice=True)
