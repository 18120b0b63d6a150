"""Log-probabilities of the targets and the gradient of the hidden states, in one visit of each chunk.

No `[T, vocabulary]` tensor exists. Pieces are cut into bites, whose boundaries depend on the piece alone:
losses, log-probabilities and LoRA are computed bite by bite. The products with the frozen weight take many
bites at once, as a row of theirs has the same bits in any product of `FEWEST_ROWS` or more. So neither
log-probabilities nor the head's LoRA gradients depend on a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.model.unembedding import (
    Projection,
    logit_slope,
    picked_logprobs,
    raw_logits,
)
from cotrain_workers.engine.training.losses import value, value_and_slope

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cotrain_workers.engine.routing import Part
    from cotrain_workers.engine.training.losses import LossSpec


# As `pack.FINE_STEP`; measured for products of up to 50,257 columns, on one and two threads.
FEWEST_ROWS = 32
NEAR = 8  # neighbours in the packed row lie less apart: a piece may begin at a multiple of 8


@dataclass(frozen=True)
class HeadInput:
    """One piece as the head sees it: `n` rows, `K` targets per row."""

    start: int  # its first row in the packed row
    needs_grad: bool
    targets: torch.Tensor  # int64 [n, K]
    inputs: Mapping[str, torch.Tensor]  # each [n, K]
    datum_lengths: Sequence[int]  # adds up to n
    loss: LossSpec
    config: Mapping[str, float]
    part: Part | None  # the adapter's LoRA on the head


@dataclass(frozen=True)
class HeadResult:
    """What the head found for one piece."""

    found: torch.Tensor  # [n, K]: log-probabilities; or [n]: divergences
    loss: torch.Tensor  # float64 scalar


@dataclass
class Bite:
    """Rows of one piece that are visited at once, and what was found."""

    given: HeadInput
    rows: slice  # of the piece
    is_whole: bool  # it is all of its piece
    logprobs: torch.Tensor = field(init=False)  # [c, K]
    slope: torch.Tensor | None = field(init=False, default=None)  # d loss / d logprob, [c, K]
    total: torch.Tensor | None = field(init=False, default=None)  # its loss, float64

    @property
    def place(self) -> slice:
        """Return its rows in the packed row."""
        return slice(self.given.start + self.rows.start, self.given.start + self.rows.stop)

    @property
    def is_ready(self) -> bool:
        """Return whether its loss needs no log-probability of another bite."""
        return self.is_whole or self.given.loss.per_token

    @property
    def goes_back(self) -> bool:
        """Return whether a visit can go on to the gradient."""
        return self.given.needs_grad and (self.is_ready or self.slope is not None)


class Head:
    """The frozen unembedding `weight` `[vocabulary, d]`, which may be tied to the input embedding."""

    def __init__(self, weight: torch.Tensor, softcap: float | None, chunk_rows: int) -> None:
        self._weight = weight
        self._softcap = softcap
        self._chunk_rows = chunk_rows

    @torch.no_grad()
    def run(
        self, given: Sequence[HeadInput], hidden: torch.Tensor, hidden_grad: torch.Tensor
    ) -> list[HeadResult]:
        """Evaluate the losses of some pieces, in the order of their rows in `hidden` `[T, d]`.

        Where they need a gradient, fill their rows of `hidden_grad` `[T, d]` and add the LoRA's.
        """
        by_piece = [list(self._bites(each)) for each in given]
        bites = [bite for of_piece in by_piece for bite in of_piece]
        for together in self._visits(bites):
            self._visit(together, hidden, hidden_grad)
        late = [bite for bite in bites if not bite.is_ready]
        for of_piece in by_piece:
            if not of_piece[0].is_ready:
                judge_by_datum(of_piece)
        for together in self._visits([bite for bite in late if bite.goes_back]):
            self._visit(together, hidden, hidden_grad)
        return [result_of(of_piece) for of_piece in by_piece]

    def _bites(self, given: HeadInput) -> Iterator[Bite]:
        rows = len(given.targets)
        for start in range(0, rows, self._chunk_rows):
            stop = min(start + self._chunk_rows, rows)
            yield Bite(given, slice(start, stop), is_whole=stop - start == rows)

    def _visits(self, bites: Sequence[Bite]) -> Iterator[list[Bite]]:
        """Put neighbours together, up to the rows of a chunk."""
        together: list[Bite] = []
        for bite in bites:
            if together and not (
                bite.goes_back == together[0].goes_back
                and 0 <= bite.place.start - together[-1].place.stop < NEAR
                and bite.place.stop - together[0].place.start <= self._chunk_rows
            ):
                yield together
                together = []
            together.append(bite)
        if together:
            yield together

    def _visit(
        self, bites: Sequence[Bite], hidden: torch.Tensor, hidden_grad: torch.Tensor
    ) -> None:
        rows = enough_rows(bites[0].place.start, bites[-1].place.stop, len(hidden))
        logits = raw_logits(hidden[rows], self._weight)
        goes_back = bites[0].goes_back
        slopes = torch.empty_like(logits)
        projections = []
        for bite in bites:
            grad = hidden_grad[bite.place] if goes_back else None
            part = bite.given.part
            to = Projection(self._weight, self._softcap, part, hidden[bite.place], grad)
            here = slice(bite.place.start - rows.start, bite.place.stop - rows.start)
            targets = bite.given.targets[bite.rows]
            bite.logprobs, p = picked_logprobs(to.adapted(logits[here]), targets, slopes[here])
            if bite.is_ready:
                judge(bite)
            if goes_back:
                assert bite.slope is not None
                to.through_cap(logit_slope(p, bite.slope, targets))
            projections.append((to, here))
        if goes_back:
            grads = slopes.to(self._weight.dtype)
            products = torch.mm(grads, self._weight)
            for to, here in projections:
                to.finish(grads[here], products[here])


def enough_rows(start: int, stop: int, limit: int) -> slice:
    """Return rows around `start` to `stop`, `FEWEST_ROWS` at least if there are as many."""
    stop = min(max(stop, start + FEWEST_ROWS), limit)
    return slice(max(0, min(start, stop - FEWEST_ROWS)), stop)


def judge(bite: Bite) -> None:
    """Compute the loss of a bite that needs no other."""
    if not bite.given.loss.per_token:
        judge_by_datum([bite])
        return
    given, inputs = bite.given, loss_inputs(bite.given, bite.rows)
    if given.needs_grad:
        found = value_and_slope(given.loss, bite.logprobs, inputs, given.config)
        bite.total, bite.slope = found
    else:
        bite.total = value(given.loss, bite.logprobs, inputs, given.config)


def judge_by_datum(bites: Sequence[Bite]) -> None:
    """Compute the loss of a piece, all of its bites given, datum by datum."""
    given = bites[0].given
    logprobs = torch.cat([bite.logprobs for bite in bites])
    both = [
        value_and_slope(given.loss, logprobs[rows], loss_inputs(given, rows), given.config)
        for rows in datum_rows(given)
    ]
    slope = torch.cat([each for _, each in both])
    for bite in bites:
        bite.slope = slope[bite.rows]
    bites[0].total = torch.stack([total for total, _ in both]).sum()


def result_of(bites: Sequence[Bite]) -> HeadResult:
    """Put together what was found of a piece."""
    totals = [bite.total for bite in bites if bite.total is not None]
    return HeadResult(torch.cat([bite.logprobs for bite in bites]), torch.stack(totals).sum())


def datum_rows(given: HeadInput) -> Iterator[slice]:
    """Yield the rows of each datum."""
    start = 0
    for length in given.datum_lengths:
        yield slice(start, start + length)
        start += length


def loss_inputs(given: HeadInput, rows: slice) -> dict[str, torch.Tensor]:
    """Return the loss inputs of some rows."""
    return {name: values[rows] for name, values in given.inputs.items()}
