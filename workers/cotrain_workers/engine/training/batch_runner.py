"""Computation of one micro-batch: the base model forward, the log-prob head, and the backward."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from cotrain_workers.engine.coordination import Forward, Yielding
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.backend import LoraBackend
from cotrain_workers.engine.model.activation_checkpointing import CHUNK_ROWS
from cotrain_workers.engine.model.base_model import BaseModel, TokenRow, hidden_states, token_row
from cotrain_workers.engine.model.expert_choice import experts_of_rows
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.model.unembedding import NewSoftmax
from cotrain_workers.engine.ops import Pass, ReverseKl
from cotrain_workers.engine.routing import Route, RowChunks, Segment, SequenceTable
from cotrain_workers.engine.training.batch_images import BatchImages
from cotrain_workers.engine.training.logprob_head import Head, HeadInput, HeadResult
from cotrain_workers.engine.training.long_slices import LongSlice
from cotrain_workers.engine.training.memory_model import BatchLimits
from cotrain_workers.engine.training.micro_batches import MicroBatch, OpSlice
from cotrain_workers.engine.training.pass_state import PassState, collect
from cotrain_workers.engine.training.reverse_kl import KlHead, References, Referred
from cotrain_workers.engine.training.shared_prompts import fold, repeat


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
        self._micro_batch_tokens = micro_batch_tokens
        self.images = BatchImages(base.vision, self._device)

    def run(self, batch: MicroBatch, passes: Sequence[PassState]) -> list[MicroBatch]:
        """Run a micro-batch and collect its results. Return it, after the micro-batches of its references."""
        referred, ran = self._references.ask_for({each: passes[each.owner].op for each in batch.op_slices})
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

    def long_slice(self, batch: MicroBatch, passes: Sequence[PassState]) -> LongSlice:
        """Return the computation of a micro-batch of one long datum, which has not begun."""
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

        if owner.gradient is not None and owner.results:
            owner.gradient_before = owner.gradient.flat.clone()
        kind = self._base.lock_step.await_pass(self._kind_of(batch, passes))
        self._base.recompute.is_on = False
        long = LongSlice(self._base, row, kind, batch.tokens, route, head)
        if self._limits.saves_memory(batch.tokens):
            long.save_memory()
        return long

    def route(self, batch: MicroBatch, passes: Sequence[PassState]) -> tuple[Route, TokenRow]:
        """Return the adapters of the rows of a micro-batch, and its tokens. Claim the gradients that it needs."""
        datums = [passes[p.owner].op.datums[p.first : p.last] for p in batch.op_slices]
        row = token_row(
            ([datum.tokens for datum in each] for each in datums),
            batch.padded_tokens,
            batch.align,
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
        hidden, starts = repeat(hidden, spans)
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
            fold(hidden_grad, spans, starts)
        return results, hidden_grad[:row_count]
