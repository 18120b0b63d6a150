"""What becomes of a micro-batch that did not fit into memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_workers.engine.training.micro_batches import MicroBatch


@dataclass(frozen=True)
class Recompute:
    """It runs again, its decoder layers computed a second time in backward."""


@dataclass(frozen=True)
class Fail:
    """The op of its only datum fails; the datum has so many tokens."""

    tokens: int


@dataclass(frozen=True)
class Split:
    """Both halves run, one after the other."""

    first: MicroBatch
    second: MicroBatch
    cuts_slice: bool
    """Whether one slice of an op became two, which moves the last bits of the op's sums."""


def after_oom(
    batch: MicroBatch, lengths: Sequence[int], *, can_recompute: bool
) -> Recompute | Fail | Split:
    """Choose what loses least; `lengths` are of the datums of the batch's first slice.

    While slices stay as they are, the sums are the same to the bit. A slice that does not fit alone is
    recomputed in backward, if it can be, and only then cut at a datum.
    """
    op_slice, *others = batch.op_slices
    if others:
        return Split(*batch.halves(), cuts_slice=False)
    if can_recompute and op_slice.needs_grad:
        return Recompute()
    if len(lengths) == 1:
        return Fail(op_slice.tokens)
    first, second = (replace(batch, op_slices=(half,)) for half in op_slice.halves(lengths))
    return Split(first, second, cuts_slice=True)
