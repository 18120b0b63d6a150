"""One forward/backward wave: all passes of a cycle in as few base-model forwards as memory allows."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from cotrain_workers.engine.device import (
    is_out_of_memory,
    release_memory,
    to_device,
    unordered_writes,
)
from cotrain_workers.engine.model.base_model import UNEMBED
from cotrain_workers.engine.model.forward import hidden_states, pack_row
from cotrain_workers.engine.ops import ReverseKl
from cotrain_workers.engine.routing import Route, Segment
from cotrain_workers.engine.sequence_table import SequenceTable
from cotrain_workers.engine.training.logprob_head import Head, HeadInput, HeadResult
from cotrain_workers.engine.training.losses import LOSSES
from cotrain_workers.engine.training.micro_batches import MicroBatch, Piece, cut, fill
from cotrain_workers.engine.training.pass_state import (
    claim_gradient,
    close,
    finish,
    give_up,
    needs_memory,
    output_of,
)
from cotrain_workers.engine.training.reverse_kl import (
    KlHead,
    KlInput,
    Question,
    References,
    weighted_rows,
)
from cotrain_workers.engine.training.validation import TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_workers.engine.cycle import Yielding
    from cotrain_workers.engine.lora.backend import LoraBackend
    from cotrain_workers.engine.model.activation_checkpointing import Choice
    from cotrain_workers.engine.model.base_model import BaseModel
    from cotrain_workers.engine.ops import Datum, Pass
    from cotrain_workers.engine.routing import Part
    from cotrain_workers.engine.training.pass_state import OpenPass
    from cotrain_workers.engine.training.reverse_kl import Referred

    States = tuple[torch.Tensor, torch.Tensor]  # hidden [n, d] and its gradient, to be filled


@dataclass
class WaveCost:
    """What a wave took."""

    forwards: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0  # without those at the yield points
    halvings: int = 0  # of what did not fit into memory
    cut_pieces: int = 0  # among that; an op so cut has other last bits than with more memory

    def add(self, batches: Sequence[MicroBatch]) -> None:
        """Count micro-batches that ran."""
        self.forwards += len(batches)
        self.tokens += sum(batch.tokens for batch in batches)
        self.padded_tokens += sum(batch.padded_tokens for batch in batches)


class Wave:
    """Runs passes over one base model. Knows micro-batches and sums, not cycles or optimizers."""

    def __init__(
        self,
        base: BaseModel,
        lora: LoraBackend,
        *,
        micro_batch_tokens: int,
        head_chunk_rows: int,
        recompute: Choice = "auto",
        keep_tokens: int = sys.maxsize,
    ) -> None:
        """Under "auto", micro-batches of more than `keep_tokens` compute their decoder layers twice."""
        self._base = base
        self._lora = lora
        self._device = base.head_weight.device
        self.head_chunk_rows = head_chunk_rows
        self._head = Head(base.head_weight, base.final_softcap, head_chunk_rows)
        self._kl_head = KlHead(base.head_weight, base.final_softcap, head_chunk_rows)
        self._references = References(base, lora, micro_batch_tokens)
        self._micro_batch_tokens = micro_batch_tokens
        self._may_recompute = recompute != "never"
        self._keep_tokens = {"always": 0, "auto": keep_tokens, "never": sys.maxsize}[recompute]
        self.safe_tokens = micro_batch_tokens
        """Tokens of a micro-batch that ought to fit: what did not has lowered it. Nobody's bits depend on
        it, as it says only who goes together."""
        wide = base.head_weight.dtype == torch.float64
        self._loss_dtype = torch.float64 if wide else torch.float32

    def run(self, passes: Sequence[OpenPass]) -> Yielding[WaveCost]:
        """Run all passes and set each one's output; yield after each micro-batch.

        Of one run, earlier passes come first.
        """
        began = time.perf_counter()
        pieces: list[Piece] = []
        for at, open_pass in enumerate(passes):
            cuts = list(self._cut(at, open_pass.op))
            open_pass.pieces_left = len(cuts)
            pieces += cuts
            if not cuts:
                open_pass.output = output_of(open_pass.op, [], 0.0)
        cost = WaveCost()
        waiting = deque(
            batch.ordered(lambda piece: self._lora.order(passes[piece.owner].adapter))
            for batch in fill(pieces, self.safe_tokens, self._lora.align)
        )
        while waiting:
            batch = waiting.popleft()
            ran = self._try(batch, passes)
            if ran is None:
                cost.forwards += 1
                self._give_way(batch, passes, waiting, cost)
            else:
                cost.add(ran)
            cost.seconds += time.perf_counter() - began
            yield
            began = time.perf_counter()
        finish(passes)
        cost.seconds += time.perf_counter() - began
        return cost

    def _try(self, batch: MicroBatch, passes: Sequence[OpenPass]) -> list[MicroBatch] | None:
        """Run a micro-batch and return it, after those that its references took.

        If memory runs out, undo it and return None.
        """
        owners = [passes[at] for at in dict.fromkeys(piece.owner for piece in batch.pieces)]
        of_earlier_pieces = [(p.gradient, p.gradient.flat.clone()) for p in owners if p.gradient]
        try:
            return self._run_micro_batch(batch, passes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Here the exception is gone, and with it the tensors that its frames held.
        for owner in owners:
            if owner.gradient is not None:
                owner.gradient.flat.zero_()
        for gradient, before in of_earlier_pieces:
            gradient.flat.copy_(before)
        release_memory(self._device)
        return None

    def _give_way(
        self,
        batch: MicroBatch,
        passes: Sequence[OpenPass],
        waiting: deque[MicroBatch],
        cost: WaveCost,
    ) -> None:
        """Put the halves of what did not fit in front; an op of which one datum does not fit fails.

        While pieces stay as they are, the sums are the same to the bit. One that does not fit by itself
        is recomputed in backward, and only then cut at a datum.
        """
        piece, *others = batch.pieces
        owner = passes[piece.owner]
        if (
            not others
            and self._may_recompute
            and piece.needs_grad
            and not self.recomputes(batch.padded_tokens)
        ):
            self._keep_tokens = batch.padded_tokens - 1
            waiting.appendleft(batch)
            return
        if not others and piece.last - piece.first == 1:
            give_up(owner, needs_memory(piece.tokens))
            left = [batch.without(piece.owner) for batch in waiting]
            waiting.clear()
            waiting.extend(batch for batch in left if batch.pieces)
            return
        if others:
            first, second = batch.halves()
        else:
            lengths = [len(datum.tokens) for datum in owner.datums(piece)]
            halves = piece.halves(lengths)
            first, second = (replace(batch, pieces=(half,)) for half in halves)
            owner.pieces_left += 1
            cost.cut_pieces += 1
        cost.halvings += 1
        self.safe_tokens = min(self.safe_tokens, max(first.tokens, second.tokens))
        waiting.extendleft((second, first))

    def recomputes(self, padded_tokens: int) -> bool:
        """Return whether layers are computed a second time at this size; no bit depends on it."""
        return padded_tokens > self._keep_tokens

    def _cut(self, at: int, op: Pass | ReverseKl) -> list[Piece]:
        lengths = [len(datum.tokens) for datum in op.datums]
        columns = [math.prod(datum.shape[1:]) for datum in op.datums]
        limit = self._micro_batch_tokens
        return list(cut(at, lengths, columns, limit, needs_grad=op.needs_grad))

    def _run_micro_batch(self, batch: MicroBatch, passes: Sequence[OpenPass]) -> list[MicroBatch]:
        referred, ran = self._ask_references(batch, passes)
        row = pack_row(
            ([datum.tokens for datum in passes[p.owner].datums(p)] for p in batch.pieces),
            batch.padded_tokens,
            batch.align,
        )
        segments, table = self._segments(batch, passes), SequenceTable(row.lengths, self._device)
        route = Route(segments, table, self._lora.of(segments, batch.padded_tokens))
        self._base.recompute.is_on = self.recomputes(batch.padded_tokens)
        with self._base.router.use(route):
            with torch.set_grad_enabled(batch.needs_grad):
                hidden = hidden_states(self._base, row)
            results, hidden_grad = self._run_head(
                batch, passes, route, hidden.detach()[0], referred
            )
            if hidden.requires_grad:
                hidden.backward(hidden_grad[None])
        collect(batch, passes, results)
        return [*ran, batch]

    def _ask_references(
        self, batch: MicroBatch, passes: Sequence[OpenPass]
    ) -> tuple[dict[Piece, Referred], list[MicroBatch]]:
        """Run the references of a micro-batch's reverse KLs; return what they say of each piece."""
        asked = {
            piece: Question(op.datums[piece.first : piece.last], op.reference)
            for piece in batch.pieces
            if isinstance(op := passes[piece.owner].op, ReverseKl)
        }
        answers, ran = self._references.ask(list(asked.values()))
        return dict(zip(asked, answers, strict=True)), ran

    def _segments(self, batch: MicroBatch, passes: Sequence[OpenPass]) -> list[Segment]:
        segments = []
        for piece, (start, stop) in zip(batch.pieces, batch.spans, strict=True):
            open_pass = passes[piece.owner]
            adapter = open_pass.adapter
            if piece.needs_grad and open_pass.gradient is None:
                open_pass.gradient = claim_gradient(adapter)
            grads = open_pass.gradient.views if open_pass.gradient else None
            segments.append(Segment(start, stop, adapter, adapter.spec.scale, grads))
        return segments

    def _run_head(
        self,
        batch: MicroBatch,
        passes: Sequence[OpenPass],
        route: Route,
        hidden: torch.Tensor,
        referred: Mapping[Piece, Referred],
    ) -> tuple[list[HeadResult], torch.Tensor]:
        hidden_grad = torch.zeros_like(hidden) if batch.needs_grad else hidden.new_empty(0)
        part_by_start = {part.start: part for part in route.lora.parts(UNEMBED)}
        inputs: list[HeadInput] = []
        results: dict[Piece, HeadResult] = {}
        for piece, segment in zip(batch.pieces, route.segments, strict=True):
            op, part = passes[piece.owner].op, part_by_start.get(segment.start)
            if isinstance(op, ReverseKl):
                rows = slice(segment.start, segment.stop)
                states = (hidden[rows], hidden_grad[rows])
                results[piece] = self._compare(op, piece, part, states, referred[piece])
            else:
                inputs.append(self._input(op, piece, part, segment.start))
        found = iter(self._head.run(inputs, hidden, hidden_grad))
        in_order = [results[piece] if piece in results else next(found) for piece in batch.pieces]
        return in_order, hidden_grad

    def _input(self, op: Pass, piece: Piece, part: Part | None, start: int) -> HeadInput:
        """Return a piece of a pass as the head wants it."""
        loss, datums = LOSSES[op.loss_fn], op.datums[piece.first : piece.last]
        return HeadInput(
            start=start,
            needs_grad=piece.needs_grad,
            targets=self._column(datums, TARGETS, torch.int64),
            inputs={name: self._column(datums, name, self._loss_dtype) for name in loss.inputs},
            datum_lengths=[len(datum.tokens) for datum in datums],
            loss=loss,
            config={**loss.defaults, **op.loss_config},
            part=part,
        )

    def _compare(
        self, op: ReverseKl, piece: Piece, part: Part | None, states: States, referred: Referred
    ) -> HeadResult:
        """Evaluate the divergences of a piece of a reverse KL; those of weight 0 are left out as 0."""
        datums, (hidden, hidden_grad) = op.datums[piece.first : piece.last], states
        rows = to_device(weighted_rows([datum.tokens for datum in datums], datums), self._device)
        all_weights = np.concatenate([datum.weights for datum in datums])
        weighted = to_device(np.flatnonzero(all_weights), self._device)
        weights = to_device(all_weights, self._device, self._loss_dtype)
        gradient = hidden.new_empty(len(rows), hidden.shape[1])
        given = KlInput(hidden[rows], part, referred, weights[weighted], op.temperature, gradient)
        found = self._kl_head.run(given)
        with unordered_writes():
            divergences = torch.zeros_like(weights).index_copy_(0, weighted, found)
            hidden_grad.index_copy_(0, rows, gradient)
        return HeadResult(divergences, (weights * divergences).sum(dtype=torch.float64))

    def _column(self, datums: Sequence[Datum], name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one input of a piece's datums, `[n, K]`; a 1-D input is one column."""
        arrays = [datum.inputs[name].reshape(len(datum.tokens), -1) for datum in datums]
        return to_device(np.concatenate(arrays), self._device, dtype)


def collect(batch: MicroBatch, passes: Sequence[OpenPass], results: Sequence[HeadResult]) -> None:
    """Note what was found of each piece, and close the passes that are complete."""
    for piece, result in zip(batch.pieces, results, strict=True):
        passes[piece.owner].results.append(result)
        passes[piece.owner].pieces_left -= 1
    for at in dict.fromkeys(piece.owner for piece in batch.pieces):
        if passes[at].pieces_left == 0:
            close(passes[at])
