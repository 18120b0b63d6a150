"""One forward/backward wave: all passes of a cycle in as few base-model forwards as memory allows."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from cotrain_workers.admission import TARGETS
from cotrain_workers.base_model import UNEMBED
from cotrain_workers.head import Head, HeadInput, HeadResult
from cotrain_workers.losses import LOSSES
from cotrain_workers.ops import Failure, PassOutput
from cotrain_workers.pack import MicroBatch, Piece, cut, fill
from cotrain_workers.route import Route, Segment, SequenceTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_workers.bank import Adapter, Gradient
    from cotrain_workers.base_model import BaseModel
    from cotrain_workers.ops import Datum, Pass


@dataclass
class OpenPass:
    """A pass in progress."""

    op: Pass
    adapter: Adapter
    pieces_left: int = 0
    gradient: Gradient | None = None  # where its weight gradients go, once a piece has run
    logprobs: list[np.ndarray] = field(default_factory=list)  # per datum
    loss_sum: float = 0.0
    output: PassOutput | Failure | None = None

    def datums(self, piece: Piece) -> Sequence[Datum]:
        """Return the datums of one of this pass's pieces."""
        return self.op.datums[piece.first : piece.last]


@dataclass
class WaveCost:
    """What a wave took."""

    forwards: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    beside_s: float = 0.0  # in `between`


class Wave:
    """Runs passes over one base model. Knows micro-batches and sums, not cycles or optimizers."""

    def __init__(self, base: BaseModel, *, micro_batch_tokens: int, head_chunk_rows: int) -> None:
        self._base = base
        self._device = base.head_weight.device
        self.head_chunk_rows = head_chunk_rows
        self._head = Head(base.head_weight, base.final_softcap, head_chunk_rows)
        self._micro_batch_tokens = micro_batch_tokens
        wide = base.head_weight.dtype == torch.float64
        self._loss_dtype = torch.float64 if wide else torch.float32

    def run(self, passes: Sequence[OpenPass], between: Callable[[], None] | None) -> WaveCost:
        """Run all passes and set each one's output. Of one run, earlier passes come first.

        Calls `between` after each micro-batch, when the model is free for other work.
        """
        pieces: list[Piece] = []
        for at, open_pass in enumerate(passes):
            cuts = list(self._cut(at, open_pass.op))
            open_pass.pieces_left = len(cuts)
            pieces += cuts
            if not cuts:
                open_pass.output = PassOutput([], 0.0)
        cost = WaveCost()
        waiting = deque(fill(pieces, self._micro_batch_tokens))
        while waiting:
            batch = waiting.popleft()
            cost.forwards += 1
            if self._fits(batch, passes):
                cost.tokens += batch.tokens
                cost.padded_tokens += batch.padded_tokens
            else:
                waiting.extendleft(reversed(batch.halves()))
            if between is not None:
                began = time.perf_counter()
                between()
                cost.beside_s += time.perf_counter() - began
        return cost

    def _fits(self, batch: MicroBatch, passes: Sequence[OpenPass]) -> bool:
        """Run a micro-batch; if memory runs out, undo it and return False (raise, if it is one piece).

        Pieces stay as they are, so that the retry in halves adds up what this one would have.
        """
        owners = [passes[at] for at in dict.fromkeys(piece.owner for piece in batch.pieces)]
        of_earlier_pieces = [(p.gradient, p.gradient.flat.clone()) for p in owners if p.gradient]
        try:
            self._run_micro_batch(batch, passes)
        except torch.OutOfMemoryError:
            if len(batch.pieces) == 1:
                raise
        else:
            return True
        # Here the exception is gone, and with it the tensors that its frames held.
        for owner in owners:
            if owner.gradient is not None:
                owner.gradient.flat.zero_()
        for gradient, before in of_earlier_pieces:
            gradient.flat.copy_(before)
        return False

    def _cut(self, at: int, op: Pass) -> list[Piece]:
        lengths = [len(datum.tokens) for datum in op.datums]
        columns = [datum.inputs[TARGETS][0].size for datum in op.datums]
        limit = self._micro_batch_tokens
        return list(cut(at, lengths, columns, limit, needs_grad=op.needs_grad))

    def _run_micro_batch(self, batch: MicroBatch, passes: Sequence[OpenPass]) -> None:
        datums = [datum for p in batch.pieces for datum in passes[p.owner].datums(p)]
        ids, positions, lengths = pack_row(datums, batch.padded_tokens)
        route = Route(self._segments(batch, passes), SequenceTable(lengths, self._device))
        with self._base.router.use(route):
            with torch.set_grad_enabled(batch.needs_grad):
                hidden = self._base.backbone(
                    input_ids=torch.from_numpy(ids)[None].to(self._device),
                    position_ids=torch.from_numpy(positions)[None].to(self._device),
                    use_cache=False,  # with a cache transformers would not see the packing
                ).last_hidden_state
            results, hidden_grad = self._run_head(batch, passes, route, hidden.detach()[0])
            if hidden.requires_grad:
                hidden.backward(hidden_grad[None])
        self._collect(batch, passes, results)

    def _segments(self, batch: MicroBatch, passes: Sequence[OpenPass]) -> list[Segment]:
        segments, start = [], 0
        for piece in batch.pieces:
            open_pass = passes[piece.owner]
            if piece.needs_grad and open_pass.gradient is None:
                open_pass.gradient = claim_gradient(open_pass.adapter)
            grads = open_pass.gradient.views if open_pass.gradient else None
            adapter = open_pass.adapter
            stop = start + piece.tokens
            segments.append(Segment(start, stop, adapter.compute, adapter.spec.scale, grads))
            start = stop
        return segments

    def _run_head(
        self, batch: MicroBatch, passes: Sequence[OpenPass], route: Route, hidden: torch.Tensor
    ) -> tuple[list[HeadResult], torch.Tensor]:
        hidden_grad = torch.zeros_like(hidden) if batch.needs_grad else hidden.new_empty(0)
        part_by_start = {part.start: part for part in route.parts(UNEMBED)}
        results = []
        for piece, segment in zip(batch.pieces, route.segments, strict=True):
            rows = slice(segment.start, segment.stop)
            op, datums = passes[piece.owner].op, passes[piece.owner].datums(piece)
            loss = LOSSES[op.loss_fn]
            given = HeadInput(
                hidden=hidden[rows],
                targets=self._column(datums, TARGETS, torch.int64),
                inputs={name: self._column(datums, name, self._loss_dtype) for name in loss.inputs},
                datum_lengths=[len(datum.tokens) for datum in datums],
                loss=loss,
                config={**loss.defaults, **op.loss_config},
                part=part_by_start.get(segment.start),
                hidden_grad=hidden_grad[rows] if piece.needs_grad else None,
            )
            results.append(self._head.run(given))
        return results, hidden_grad

    def _column(self, datums: Sequence[Datum], name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one input of a piece's datums, `[n, K]`; a 1-D input is one column."""
        arrays = [datum.inputs[name].reshape(len(datum.tokens), -1) for datum in datums]
        return torch.from_numpy(np.concatenate(arrays)).to(self._device, dtype)

    def _collect(
        self, batch: MicroBatch, passes: Sequence[OpenPass], results: Sequence[HeadResult]
    ) -> None:
        """Copy log-probabilities and losses to the host, and settle the passes that are complete."""
        flat = torch.cat([result.logprobs.flatten() for result in results]).float().cpu().numpy()
        losses = torch.stack([result.loss for result in results]).tolist()
        start = 0
        for piece, loss in zip(batch.pieces, losses, strict=True):
            open_pass = passes[piece.owner]
            for datum in open_pass.datums(piece):
                shape = datum.inputs[TARGETS].shape
                size = int(np.prod(shape))
                open_pass.logprobs.append(flat[start : start + size].reshape(shape))
                start += size
            open_pass.loss_sum += loss
            open_pass.pieces_left -= 1
        for at in dict.fromkeys(piece.owner for piece in batch.pieces):
            if passes[at].pieces_left == 0:
                settle(passes[at])


def pack_row(
    datums: Sequence[Datum], padded_tokens: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return token ids and positions `[padded_tokens]` and the sequence lengths, filler included."""
    lengths = [len(datum.tokens) for datum in datums]
    filler = padded_tokens - sum(lengths)
    if filler:
        lengths.append(filler)
    ids = np.zeros(padded_tokens, dtype=np.int64)
    ids[: padded_tokens - filler] = np.concatenate([datum.tokens for datum in datums])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return ids, positions, lengths


def claim_gradient(adapter: Adapter) -> Gradient:
    """Return where an op may add its gradient: the adapter's own arena while that is clean, else scratch.

    An op that fails is then undone by zeroing the arena or dropping the scratch. Both start from zeros,
    so the bits of the sum do not depend on which it was.
    """
    if adapter.grads_pending or adapter.gradient_in_use:
        return adapter.scratch_gradient()
    adapter.gradient_in_use = True
    return adapter.gradient


def settle(done: OpenPass) -> None:
    """Accept a complete pass and keep its gradient, or fail it and leave no trace of it."""
    is_finite = math.isfinite(done.loss_sum) and all(np.isfinite(lp).all() for lp in done.logprobs)
    if done.gradient is not None:
        is_finite = is_finite and is_all_finite(done.gradient.flat)
        settle_gradient(done.adapter, done.gradient, keep=is_finite)
        done.gradient = None
    done.output = PassOutput(done.logprobs, done.loss_sum) if is_finite else not_finite(done.op)


def settle_gradient(adapter: Adapter, gradient: Gradient, *, keep: bool) -> None:
    """Add a claimed gradient to the adapter's, or drop it; those of earlier ops stay as they are."""
    is_own = gradient is adapter.gradient
    if is_own:
        adapter.gradient_in_use = False
    if keep:
        adapter.grads_pending = True
        if not is_own:
            adapter.gradient.flat.add_(gradient.flat)
    elif is_own:
        gradient.flat.zero_()


def is_all_finite(arena: torch.Tensor) -> bool:
    """Return whether an arena holds no NaN and no infinity. Waits for the device."""
    low, high = arena.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def not_finite(op: Pass) -> Failure:
    """Return the answer to a pass whose loss, log-probabilities or gradient are not finite."""
    kept = "; the gradient was discarded" if op.needs_grad else ""
    return Failure(f"Loss is not finite (seq {op.seq}){kept}.", "user")
