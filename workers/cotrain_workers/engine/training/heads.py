"""Heads of a pass: log-probabilities with a loss, and the reverse KL to a frozen reference.

A head is the frozen unembedding with its loss. Each computes its values and the gradient of the hidden states in one
visit of each row. No `[T, vocabulary]` tensor exists. The result of a slice depends on that slice alone.

Slices are cut into chunks, whose boundaries depend on the slice alone. Losses, log-probabilities
and LoRA are computed chunk by chunk. The products with the frozen weight cover many chunks at once: each row has the
same bits in any product of at least `FEWEST_ROWS` rows. So neither log-probabilities nor the head's LoRA gradients
depend on a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cotrain_workers.engine.coordination import Forward, Yielding, run_to_end
from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.lora.backend import LoraBackend
from cotrain_workers.engine.model.base_model import BaseModel, hidden_states, token_row
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.model.unembedding import NewSoftmax, PlainSoftmax, Projection, raw_logits
from cotrain_workers.engine.ops import Datum, HostWeights, KlDatum, Pass, ReverseKl
from cotrain_workers.engine.routing import Part, Route, Segment, SequenceTable
from cotrain_workers.engine.spec import Layout, Pair, plan_layout
from cotrain_workers.engine.training.losses import (
    DATUM_LENGTHS,
    TARGETS,
    LossSpec,
    inputs_of,
    loss_of,
    value,
    value_and_slope,
)
from cotrain_workers.engine.training.micro_batches import MicroBatch, OpSlice, cut_op, fill

# Same as `routing.FINE_STEP`; measured for products of up to 50,257 columns, on one and two threads.
FEWEST_ROWS = 32
NEAR = 8  # maximum gap of neighbours in the packed row: a slice may begin at a multiple of 8


class Head:
    """Frozen unembedding `weight` `[vocabulary, d]`, which may be tied to the input embedding."""

    def __init__(
        self, weight: torch.Tensor, softcap: float | None, chunk_rows: int, new_softmax: NewSoftmax = PlainSoftmax
    ) -> None:
        self._weight = weight
        self._softcap = softcap
        self._chunk_rows = chunk_rows
        self._new_softmax = new_softmax
        self._loss_dtype = torch.promote_types(weight.dtype, torch.float32)

    def input(self, op: Pass, op_slice: OpSlice, part: Part | None, start: int) -> HeadInput:
        """Return the head's input for a slice of a pass that starts at row `start`."""
        datums = op.datums[op_slice.first : op_slice.last]
        loss = loss_of(op, datums)
        return HeadInput(
            start=start,
            needs_grad=op_slice.needs_grad,
            targets=self._column(datums, TARGETS, torch.int64),
            inputs={name: self._column(datums, name, self._loss_dtype) for name in inputs_of(op, loss)},
            datum_lengths=[len(datum.tokens) for datum in datums],
            loss=loss,
            config={**loss.defaults, **op.loss_config},
            part=part,
        )

    def _column(self, datums: Sequence[Datum], name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one input of a slice's datums, `[n, K]`; a 1-D input is one column."""
        arrays = [datum.inputs[name].reshape(len(datum.tokens), -1) for datum in datums]
        return to_device(np.concatenate(arrays), self._weight.device, dtype)

    def run(self, given: Sequence[HeadInput], hidden: torch.Tensor, hidden_grad: torch.Tensor) -> list[HeadResult]:
        """Run `visits` to its end."""
        return run_to_end(self.visits(given, hidden, hidden_grad))

    @torch.no_grad()
    def visits(
        self, given: Sequence[HeadInput], hidden: torch.Tensor, hidden_grad: torch.Tensor
    ) -> Yielding[list[HeadResult]]:
        """Evaluate the losses of some slices, in the order of their rows in `hidden` `[T, d]`.

        For slices that need a gradient, fill their rows of `hidden_grad` `[T, d]` and add the
        LoRA's. Yields after each chunk of rows.
        """
        by_slice = [list(self._chunks(each)) for each in given]
        chunks = [chunk for of_slice in by_slice for chunk in of_slice]
        for together in self._visits(chunks):
            self._visit(together, hidden, hidden_grad)
            yield
        # A loss over whole datums is known only now. A second visit of its chunks computes their gradient.
        late = [of_slice for of_slice in by_slice if not of_slice[0].is_ready]
        for of_slice in late:
            add_loss(of_slice)
        for together in self._visits([chunk for of_slice in late for chunk in of_slice if chunk.goes_back]):
            self._visit(together, hidden, hidden_grad)
            yield
        return [result_of(of_slice) for of_slice in by_slice]

    def _chunks(self, given: HeadInput) -> Iterator[HeadChunk]:
        rows = len(given.targets)
        for start in range(0, rows, self._chunk_rows):
            stop = min(start + self._chunk_rows, rows)
            yield HeadChunk(given, slice(start, stop), is_whole=stop - start == rows)

    def _visits(self, chunks: Sequence[HeadChunk]) -> Iterator[list[HeadChunk]]:
        """Group neighbours, up to the rows of a chunk."""
        together: list[HeadChunk] = []
        for chunk in chunks:
            if together and not (
                chunk.goes_back == together[0].goes_back
                and 0 <= chunk.row_span.start - together[-1].row_span.stop < NEAR
                and chunk.row_span.stop - together[0].row_span.start <= self._chunk_rows
            ):
                yield together
                together = []
            together.append(chunk)
        if together:
            yield together

    def _visit(self, chunks: Sequence[HeadChunk], hidden: torch.Tensor, hidden_grad: torch.Tensor) -> None:
        rows = enough_rows(chunks[0].row_span.start, chunks[-1].row_span.stop, len(hidden))
        logits = raw_logits(hidden[rows], self._weight)
        goes_back, placed = chunks[0].goes_back, []
        for chunk in chunks:
            grad = hidden_grad[chunk.row_span] if goes_back else None
            to = Projection(self._weight, None, chunk.given.part, hidden[chunk.row_span], grad)
            here = slice(chunk.row_span.start - rows.start, chunk.row_span.stop - rows.start)
            to.adapted(logits[here])
            placed.append((chunk, to, here))
        softmax = self._new_softmax(logits, self._softcap, self._weight.dtype, goes_back=goes_back)
        for chunk, _, here in placed:
            chunk.logprobs = softmax.logprobs(here, chunk.targets)
            if chunk.is_ready:
                add_loss([chunk])
            if goes_back:
                assert chunk.slope is not None
                softmax.go_back(here, chunk.targets, chunk.slope)
        if goes_back:
            grads = softmax.gradient()
            products = torch.mm(grads, self._weight)
            for _, to, here in placed:
                to.finish(grads[here], products[here])


@dataclass(frozen=True)
class HeadInput:
    """Input of the head for one slice of an op: `n` rows, `K` targets per row."""

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
    """Result of the head for one slice."""

    found: torch.Tensor  # [n, K]: log-probabilities; or [n]: divergences
    loss: torch.Tensor  # float64 scalar


@dataclass
class HeadChunk:
    """Rows of one slice that are visited at once, and their results."""

    given: HeadInput
    rows: slice  # of the slice
    is_whole: bool  # it is all of its slice
    logprobs: torch.Tensor = field(init=False)  # [c, K]
    slope: torch.Tensor | None = field(init=False, default=None)  # d loss / d logprob, [c, K]
    total: torch.Tensor | None = field(init=False, default=None)  # its loss, float64

    @property
    def targets(self) -> torch.Tensor:
        """Targets of its rows, `[c, K]`."""
        return self.given.targets[self.rows]

    @property
    def row_span(self) -> slice:
        """Position in the packed row."""
        return slice(self.given.start + self.rows.start, self.given.start + self.rows.stop)

    @property
    def is_ready(self) -> bool:
        """True if its loss needs no log-probability of another chunk."""
        return self.is_whole or self.given.loss.per_token

    @property
    def goes_back(self) -> bool:
        """True if a visit can continue to the gradient."""
        return self.given.needs_grad and (self.is_ready or self.slope is not None)


def enough_rows(start: int, stop: int, limit: int) -> slice:
    """Return rows around `start` to `stop`: at least `FEWEST_ROWS`, if that many exist."""
    stop = min(max(stop, start + FEWEST_ROWS), limit)
    return slice(max(0, min(start, stop - FEWEST_ROWS)), stop)


def add_loss(chunks: Sequence[HeadChunk]) -> None:
    """Compute the loss of neighbouring chunks, which need no other chunk, and its slope if they need a gradient."""
    given, rows = chunks[0].given, slice(chunks[0].rows.start, chunks[-1].rows.stop)
    # One chunk, as in most losses, costs no copy.
    logprobs = chunks[0].logprobs if len(chunks) == 1 else torch.cat([c.logprobs for c in chunks])
    inputs = {name: values[rows] for name, values in given.inputs.items()}
    if not given.loss.per_token:
        inputs[DATUM_LENGTHS] = to_device(np.array(given.datum_lengths), logprobs.device)
    if given.needs_grad:
        total, slope = value_and_slope(given.loss, logprobs, inputs, given.config)
        for chunk in chunks:
            chunk.slope = slope[chunk.rows.start - rows.start : chunk.rows.stop - rows.start]
    else:
        total = value(given.loss, logprobs, inputs, given.config)
    chunks[0].total = total


def result_of(chunks: Sequence[HeadChunk]) -> HeadResult:
    """Combine the results of a slice."""
    totals = [chunk.total for chunk in chunks if chunk.total is not None]
    return HeadResult(torch.cat([chunk.logprobs for chunk in chunks]), torch.stack(totals).sum())


class KlHead:
    """Reverse KL over whole distributions: the frozen unembedding under two adapters at once.

    With `p` the run's and `q` the reference's softmax of logits / T, per target, `KL = sum_v p_v (log p_v - log q_v)`
    and `d KL / d logit_v = p_v (log p_v - log q_v - KL) / T`.
    """

    def __init__(self, weight: torch.Tensor, softcap: float | None, chunk_rows: int) -> None:
        self._weight = weight
        self._softcap = softcap
        self._chunk_rows = chunk_rows
        self._loss_dtype = torch.promote_types(weight.dtype, torch.float32)

    @torch.no_grad()
    def compare(
        self,
        datums: Sequence[KlDatum],
        temperature: float,
        part: Part | None,
        referred: Referred,
        hidden: torch.Tensor,
        hidden_grad: torch.Tensor,
    ) -> HeadResult:
        """Compute the divergences of a slice of a reverse KL; targets of weight 0 get 0. Add the run's LoRA gradients.

        `hidden` and `hidden_grad` `[n, d]` are the slice's rows; the latter is filled.
        """
        device = hidden.device
        rows = to_device(weighted_rows([datum.tokens for datum in datums], datums), device)
        all_weights = np.concatenate([datum.weights for datum in datums])
        weighted = to_device(np.flatnonzero(all_weights), device)
        weights = to_device(all_weights, device, self._loss_dtype)
        gradient, own = hidden.new_empty(len(rows), hidden.shape[1]), hidden[rows]
        factors = weights[weighted] / temperature
        found = torch.empty_like(factors)
        for start in range(0, len(found), self._chunk_rows):
            some = slice(start, start + self._chunk_rows)
            ours = self._projection(own[some], part, gradient[some])
            theirs = self._projection(referred.hidden[some], referred.part)
            found[some] = self._visit(ours, theirs, temperature, factors[some])
        with unordered_writes():
            divergences = torch.zeros_like(weights).index_copy_(0, weighted, found)
            hidden_grad.index_copy_(0, rows, gradient)
        return HeadResult(divergences, (weights * divergences).sum(dtype=torch.float64))

    def _visit(self, ours: Projection, theirs: Projection, temperature: float, factors: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each target; `factors` `[c]` are their weights / `temperature`."""
        p = torch.log_softmax(ours.logits().div_(temperature), dim=-1)
        q = torch.log_softmax(theirs.logits().div_(temperature), dim=-1)
        apart = q.neg_().add_(p)  # log p - log q
        p.exp_()
        divergence = (p * apart).sum(dim=-1)
        ours.backward(apart.sub_(divergence[:, None]).mul_(p).mul_(factors[:, None]))
        return divergence

    def _projection(self, hidden: torch.Tensor, part: Part | None, grad: torch.Tensor | None = None) -> Projection:
        return Projection(self._weight, self._softcap, part, hidden, grad)


class References:
    """Executor of references over one base model: many tenants' in one packed row, without gradients."""

    def __init__(self, base: BaseModel, lora: LoraBackend, micro_batch_tokens: int) -> None:
        self._base = base
        self._lora = lora
        self._device = base.head_weight.device
        self._micro_batch_tokens = micro_batch_tokens

    @torch.no_grad()
    def run(self, ops: Mapping[OpSlice, Pass | ReverseKl]) -> tuple[dict[OpSlice, Referred], list[MicroBatch]]:
        """Run the references of a micro-batch's reverse KLs.

        Return their results by slice, and the micro-batches that were run for them.
        """
        asked = {each: op for each, op in ops.items() if isinstance(op, ReverseKl)}
        datums = [op.datums[each.first : each.last] for each, op in asked.items()]
        adapters = self._adapters([op.reference for op in asked.values()])
        limit = self._micro_batch_tokens
        op_slices = [
            op_slice
            for at, own in enumerate(datums)
            for op_slice in cut_op(at, [len(datum.reference) for datum in own], [1] * len(own), limit, needs_grad=False)
        ]
        batches = fill(op_slices, limit)
        hidden: list[list[torch.Tensor]] = [[] for _ in asked]
        for batch in batches:
            for op_slice, found in zip(batch.op_slices, self._run_batch(batch, datums, adapters), strict=True):
                hidden[op_slice.owner].append(found)
        referred = {}
        for each, parts, adapter in zip(asked, hidden, adapters, strict=True):
            rows = torch.cat(parts)
            referred[each] = Referred(rows, adapter.head_part(len(rows)))
        return referred, batches

    def _run_batch(
        self, batch: MicroBatch, asked: Sequence[Sequence[KlDatum]], adapters: Sequence[FrozenAdapter]
    ) -> list[torch.Tensor]:
        """Return the hidden states of the weighted targets of each slice, `[m, d]`."""
        datums = [asked[op_slice.owner][op_slice.first : op_slice.last] for op_slice in batch.op_slices]
        row = token_row(([datum.reference for datum in each] for each in datums), batch.padded_tokens)
        segments = [
            Segment(start, stop, adapters[op_slice.owner], adapters[op_slice.owner].scale, None)
            for (start, stop), op_slice in zip(batch.spans, batch.op_slices, strict=True)
        ]
        table = SequenceTable(row.lengths, self._device)
        route = Route(segments, table, self._lora.of(segments, batch.padded_tokens))
        self._base.lock_step.await_pass(Forward.PLAIN)
        with self._base.router.use(route):
            hidden = hidden_states(self._base, row)[0]
        return [
            hidden[segment.start : segment.stop][
                to_device(weighted_rows([d.reference for d in each], each), self._device)
            ]
            for segment, each in zip(segments, datums, strict=True)
        ]

    def _adapters(self, references: Sequence[HostWeights | None]) -> list[FrozenAdapter]:
        """Copy each reference to the device, once."""
        copies = {key: self._adapter(each) for key, each in {id(each): each for each in references}.items()}
        return [copies[id(each)] for each in references]

    def _adapter(self, weights: HostWeights | None) -> FrozenAdapter:
        if weights is None:
            return FrozenAdapter(Layout(1, (), {}, 0), torch.empty(0), {}, 1.0)
        layout = plan_layout(weights.spec, self._base.targets)
        flat = to_device(weights.flat, self._device, self._base.head_weight.dtype)
        return FrozenAdapter(layout, flat, layout.views(flat), weights.spec.scale)


@dataclass(frozen=True)
class Referred:
    """Reference's hidden states of the weighted targets of one slice."""

    hidden: torch.Tensor  # [m, d]
    part: Part | None  # its LoRA on the head


@dataclass(frozen=True)
class FrozenAdapter:
    """Matrices of a reference on the device; none for the base model alone."""

    layout: Layout
    weights: torch.Tensor  # in the base model's type
    compute: Mapping[str, Pair]
    scale: float

    def head_part(self, rows: int) -> Part | None:
        """Return its LoRA on the head for a slice of `rows`."""
        pair = self.compute.get(UNEMBED)
        return None if pair is None else Part(0, rows, pair, self.scale, None)


def weighted_rows(sequences: Sequence[np.ndarray], datums: Sequence[KlDatum]) -> np.ndarray:
    """Return the rows of packed `sequences` that predict a target of non-zero weight: int64 `[m]`.

    `sequences` are those of `datums`, the run's or the reference's.
    """
    found, end = [], 0
    for sequence, datum in zip(sequences, datums, strict=True):
        end += len(sequence)
        found.append(end - len(datum.weights) + np.flatnonzero(datum.weights))
    return np.concatenate(found)
