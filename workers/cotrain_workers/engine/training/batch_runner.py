"""Computation of one micro-batch: the base model forward, the log-prob head, and the backward.

The packed row holds the results of the vision tower for images, and each shared prompt once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from cotrain_workers.engine.coordination import Forward, Yielding
from cotrain_workers.engine.device import is_out_of_memory, release_memory, to_device
from cotrain_workers.engine.lora.backend import LoraBackend
from cotrain_workers.engine.model.activation_checkpointing import CHUNK_ROWS
from cotrain_workers.engine.model.base_model import BaseModel, TokenRow, hidden_states, token_row
from cotrain_workers.engine.model.expert_choice import experts_of_rows
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.model.unembedding import NewSoftmax
from cotrain_workers.engine.model.vision import ImageUnusable, Vision, image_rows, rotary_positions
from cotrain_workers.engine.ops import Datum, Failure, Pass, ReverseKl
from cotrain_workers.engine.routing import ImageRows, Route, RowChunks, Segment, SequenceTable
from cotrain_workers.engine.training.heads import Head, HeadInput, HeadResult, KlHead, References, Referred
from cotrain_workers.engine.training.long_slices import LongSlice, StartedLong
from cotrain_workers.engine.training.micro_batches import BatchLimits, MicroBatch, OpSlice, Span
from cotrain_workers.engine.training.pass_outputs import memory_failure
from cotrain_workers.engine.training.pass_state import PassState, collect


class BatchRunner:
    """Computation of micro-batches on one base model. Memory that runs out is an error here."""

    def __init__(
        self,
        base: BaseModel,
        lora: LoraBackend,
        limits: BatchLimits,
        *,
        micro_batch_tokens: int,
        head_chunk_rows: int,
        new_softmax: NewSoftmax,
    ) -> None:
        """`limits` decide about each size: layers kept or recomputed, and layer inputs on the host."""
        self._base = base
        self._lora = lora
        self._limits = limits
        self._device = base.head_weight.device
        self._head = Head(base.head_weight, base.final_softcap, head_chunk_rows, new_softmax)
        self._kl_head = KlHead(base.head_weight, base.final_softcap, head_chunk_rows)
        self._references = References(base, lora, micro_batch_tokens)
        self.images = BatchImages(base.vision, self._device)

    def run(self, batch: MicroBatch, passes: Sequence[PassState]) -> list[MicroBatch]:
        """Run a micro-batch and collect its results. Return it, after the micro-batches of its references."""
        referred, ran = self._references.run({each: passes[each.owner].op for each in batch.op_slices})
        route, row = self.route(batch, passes)
        kind = self._base.lock_step.await_pass(self._kind_of(batch, passes))
        self._base.recompute.is_on = kind is Forward.RECOMPUTED
        with self._base.router.use(route):
            with torch.set_grad_enabled(kind.goes_back):
                hidden = hidden_states(self._base, row)
            results, hidden_grad = self._run_head(batch, passes, route, hidden.detach()[0], referred)
            if hidden.requires_grad:
                hidden.backward(hidden_grad[None])
        collect(batch, passes, results)
        return [*ran, batch]

    def start_long(self, batch: MicroBatch, passes: Sequence[PassState]) -> StartedLong:
        """Return a micro-batch of one long datum, ready for its first layer."""
        route, row = self.route(batch, passes)
        owner, op_slice = passes[batch.op_slices[0].owner], batch.op_slices[0]
        op = owner.op
        assert isinstance(op, Pass)

        def head(route: Route, hidden: torch.Tensor) -> Yielding[tuple[HeadResult, torch.Tensor]]:
            part = next(iter(route.lora.parts(UNEMBED)), None)
            given = self._head.input(op, op_slice, part, 0)
            grad = torch.zeros_like(hidden) if op_slice.needs_grad else hidden.new_empty(0)
            (result,) = yield from self._head.visits([given], hidden, grad)
            return result, grad

        before = owner.gradient.flat.clone() if owner.gradient is not None and owner.results else None
        kind = self._base.lock_step.await_pass(self._kind_of(batch, passes))
        self._base.recompute.is_on = False
        long = LongSlice(self._base, row, kind, batch.tokens, route, head)
        if self._limits.saves_memory(batch.tokens):
            long.save_memory()
        return StartedLong(long, long.run(), before)

    def route(self, batch: MicroBatch, passes: Sequence[PassState]) -> tuple[Route, TokenRow]:
        """Return the adapters of the rows of a micro-batch, and its tokens. Claim the gradients that it needs."""
        datums = [passes[p.owner].op.datums[p.first : p.last] for p in batch.op_slices]
        row = token_row(
            ([datum.tokens for datum in each] for each in datums),
            batch.padded_tokens,
            [passes[each.owner].shared_in(each) for each in batch.op_slices],
        )
        segments = self._segments(batch, passes)
        table = SequenceTable(row.lengths, self._device, row.prompts)
        lora = self._lora.of(segments, batch.padded_tokens)
        chunks = RowChunks(CHUNK_ROWS, self._lora.of) if self._limits.saves_memory(batch.tokens) else None
        row, images = self.images.insert(batch, passes, row)
        starts = zip(batch.op_slices, batch.spans, strict=True)
        given = (passes[each.owner].given_experts(each, start) for each, (start, _) in starts)
        experts = experts_of_rows(self._base.expert_choices, batch.padded_tokens, chain.from_iterable(given))
        on_device = None if experts is None else to_device(experts, self._device)
        return Route(segments, table, lora, on_device, images, chunks), row

    def _kind_of(self, batch: MicroBatch, passes: Sequence[PassState]) -> Forward:
        specs = [passes[p.owner].adapter.spec for p in batch.op_slices if p.needs_grad]
        if not any(spec.train_attn or spec.train_mlp for spec in specs):
            return Forward.PLAIN  # gradients of the unembedding are computed in the head
        if self._limits.recomputes(batch.padded_tokens):
            return Forward.RECOMPUTED
        return Forward.BACKWARD

    def _segments(self, batch: MicroBatch, passes: Sequence[PassState]) -> list[Segment]:
        segments = []
        for op_slice, (start, stop) in zip(batch.op_slices, batch.spans, strict=True):
            state = passes[op_slice.owner]
            adapter = state.adapter
            if op_slice.needs_grad and state.gradient is None:
                may_stay_open = state.allowance is not None
                state.gradient = adapter.claim_gradient(may_stay_open=may_stay_open)
            grads = state.gradient.views if state.gradient else None
            if state.gradient and not self._lora.stores_first:
                state.gradient.settle()
            segments.append(Segment(start, stop, adapter, adapter.scale, grads))
        return segments

    def _run_head(
        self,
        batch: MicroBatch,
        passes: Sequence[PassState],
        route: Route,
        hidden: torch.Tensor,
        referred: Mapping[OpSlice, Referred],
    ) -> tuple[dict[OpSlice, HeadResult], torch.Tensor]:
        spans = {
            start: of_slice
            for op_slice, (start, _) in zip(batch.op_slices, batch.spans, strict=True)
            if (of_slice := passes[op_slice.owner].spans(op_slice, start))
        }
        row_count = len(hidden)
        hidden, starts = _repeat(hidden, spans)
        hidden_grad = torch.zeros_like(hidden) if batch.needs_grad else hidden.new_empty(0)
        part_by_start = {part.start: part for part in route.lora.parts(UNEMBED)}
        inputs: dict[OpSlice, HeadInput] = {}
        results: dict[OpSlice, HeadResult] = {}
        for op_slice, segment in zip(batch.op_slices, route.segments, strict=True):
            op, part = passes[op_slice.owner].op, part_by_start.get(segment.start)
            if isinstance(op, ReverseKl):
                rows = slice(segment.start, segment.stop)
                states = (hidden[rows], hidden_grad[rows])
                datums = op.datums[op_slice.first : op_slice.last]
                given = (datums, op.temperature, part, referred[op_slice])
                results[op_slice] = self._kl_head.compare(*given, *states)
            else:
                start = starts.get(segment.start, segment.start)
                inputs[op_slice] = self._head.input(op, op_slice, part, start)
        found = self._head.run(list(inputs.values()), hidden, hidden_grad)
        results.update(zip(inputs, found, strict=True))
        if batch.needs_grad:
            _fold(hidden_grad, spans, starts)
        return results, hidden_grad[:row_count]


class BatchImages:
    """Images of the micro-batch that runs next."""

    def __init__(self, vision: Vision | None, device: torch.device) -> None:
        self._vision = vision
        self._device = device
        self._features: dict[tuple[str, bytes], torch.Tensor] = {}  # by tenant and digest

    def compute(self, batch: MicroBatch, passes: Sequence[PassState]) -> Yielding[int | None]:
        """Run the tower for the images of a micro-batch; yield after each one that it computes.

        Return the owner of an image that cannot be computed, after failing its pass; None if there is none.
        """
        if self._vision is None:
            return None
        wanted = {
            (_scope(op), image.digest): (op_slice.owner, image)
            for op_slice, op, datums in _of_passes(batch, passes)
            for datum in datums
            for image in datum.images
        }
        self._features = {key: self._features[key] for key in wanted if key in self._features}
        for key, (owner, image) in wanted.items():
            if key in self._features:
                continue
            failure = None
            try:
                self._features[key] = self._vision.features(key[0], image)
            except ImageUnusable as unusable:
                failure = Failure(str(unusable), "user")
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = memory_failure(image.tokens)
            if failure is not None:
                release_memory(self._device)
                passes[owner].fail(failure)
                return owner
            yield
        return None

    def insert(
        self, batch: MicroBatch, passes: Sequence[PassState], row: TokenRow
    ) -> tuple[TokenRow, ImageRows | None]:
        """Return the row with the positions of its images, and the images of its route."""
        if not self._features:
            return row, None
        placed: list[tuple[int, torch.Tensor]] = []
        positions = np.tile(row.positions, (3, 1))
        start_by_slice = {op_slice: start for op_slice, (start, _) in zip(batch.op_slices, batch.spans, strict=True)}
        for op_slice, op, datums in _of_passes(batch, passes):
            start = start_by_slice[op_slice]
            shared = passes[op_slice.owner].shared_in(op_slice)
            for datum, prompt in zip(datums, shared, strict=True):
                stop = start + len(datum.tokens) - prompt
                if datum.images:
                    positions[:, start:stop], _ = rotary_positions(stop - start, datum.images)
                placed += [(start + image.start, self._features[_scope(op), image.digest]) for image in datum.images]
                start = stop
        return replace(row, positions=positions), image_rows(placed, self._device)


def _scope(op: Pass) -> str:
    return op.tenant or op.run


def _of_passes(batch: MicroBatch, passes: Sequence[PassState]) -> Iterator[tuple[OpSlice, Pass, Sequence[Datum]]]:
    """Yield the slices that may have images, each with its pass and its datums."""
    for op_slice in batch.op_slices:
        op = passes[op_slice.owner].op
        if isinstance(op, Pass):
            yield op_slice, op, op.datums[op_slice.first : op_slice.last]


def _repeat(hidden: torch.Tensor, spans: Mapping[int, Sequence[Span]]) -> tuple[torch.Tensor, dict[int, int]]:
    """Append all rows of all datums of some slices to the hidden states `[T, d]` of a packed row.

    `spans` are by the first row of the slice. Returns the states `[T + n, d]`, and the new first row by the first row.
    All other rows stay at their places.
    """
    starts, parts = {}, [hidden]
    rows = len(hidden)
    for first, of_slice in spans.items():
        starts[first] = rows
        parts += [hidden[start:stop] for start, stop, _ in of_slice]
        rows += sum(stop - start for start, stop, _ in of_slice)
    return (torch.cat(parts) if starts else hidden), starts


def _fold(grad: torch.Tensor, spans: Mapping[int, Sequence[Span]], starts: Mapping[int, int]) -> None:
    """Write the gradient of the rows that `_repeat` appended to their rows of `grad` `[T + n, d]`.

    Gradients of shared rows add up.
    """
    for first, of_slice in spans.items():
        at = starts[first]
        for start, stop, is_shared in of_slice:
            part = grad[at : at + stop - start]
            if is_shared:
                grad[start:stop] += part
            else:
                grad[start:stop] = part
            at += stop - start
