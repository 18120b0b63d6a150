"""Reverse KL to a frozen reference, over whole distributions: the reference's forward, and the
head.

With `p` the run's and `q` the reference's softmax of logits / T, per target: `KL = sum_v p_v (log
p_v - log q_v)` and `d KL / d logit_v = p_v (log p_v - log q_v - KL) / T`. Value and gradient are
computed in one visit of a chunk of rows, as in `logprob_head.py`: no `[tokens, vocabulary]` tensor
exists. The result of a slice depends on that slice alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cotrain_workers.engine.coordination import Forward
from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.lora.backend import LoraBackend
from cotrain_workers.engine.model.base_model import BaseModel, hidden_states, token_row
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.model.unembedding import Projection
from cotrain_workers.engine.ops import HostWeights, KlDatum, Pass, ReverseKl
from cotrain_workers.engine.routing import Part, Route, Segment, SequenceTable
from cotrain_workers.engine.spec import Layout, Pair, plan_layout
from cotrain_workers.engine.training.logprob_head import HeadResult
from cotrain_workers.engine.training.micro_batches import MicroBatch, OpSlice, cut, fill


@dataclass(frozen=True)
class Referred:
    """Reference's hidden states of the weighted targets of one slice."""

    hidden: torch.Tensor  # [m, d]
    part: Part | None  # its LoRA on the head


class KlHead:
    """Frozen unembedding under two adapters at once."""

    def __init__(self, weight: torch.Tensor, softcap: float | None, chunk_rows: int) -> None:
        self._weight = weight
        self._softcap = softcap
        self._chunk_rows = chunk_rows
        wide = weight.dtype == torch.float64
        self._loss_dtype = torch.float64 if wide else torch.float32

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
    def ask_for(self, ops: Mapping[OpSlice, Pass | ReverseKl]) -> tuple[dict[OpSlice, Referred], list[MicroBatch]]:
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
            for op_slice in cut(at, [len(datum.reference) for datum in own], [1] * len(own), limit, needs_grad=False)
        ]
        order = [self._lora.order(adapter) for adapter in adapters]
        batches = fill(op_slices, limit, self._lora.align, order)
        hidden: list[list[torch.Tensor]] = [[] for _ in asked]
        for batch in batches:
            for op_slice, found in zip(batch.op_slices, self._run(batch, datums, adapters), strict=True):
                hidden[op_slice.owner].append(found)
        referred = {}
        for each, parts, adapter in zip(asked, hidden, adapters, strict=True):
            rows = torch.cat(parts)
            referred[each] = Referred(rows, adapter.head_part(len(rows)))
        return referred, batches

    def _run(
        self, batch: MicroBatch, asked: Sequence[Sequence[KlDatum]], adapters: Sequence[FrozenAdapter]
    ) -> list[torch.Tensor]:
        """Return the hidden states of the weighted targets of each slice, `[m, d]`."""
        datums = [asked[op_slice.owner][op_slice.first : op_slice.last] for op_slice in batch.op_slices]
        row = token_row(([datum.reference for datum in each] for each in datums), batch.padded_tokens, batch.align)
        segments = [
            Segment(start, stop, adapter, adapter.scale, None)
            for (start, stop), adapter in zip(
                batch.spans, (adapters[op_slice.owner] for op_slice in batch.op_slices), strict=True
            )
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
        known = {id(each): each for each in references}
        copies = {key: self._adapter(each) for key, each in known.items()}
        return [copies[id(each)] for each in references]

    def _adapter(self, weights: HostWeights | None) -> FrozenAdapter:
        if weights is None:
            return FrozenAdapter(Layout(1, (), {}, 0), torch.empty(0), {}, 1.0)
        layout = plan_layout(weights.spec, self._base.targets)
        flat = to_device(weights.flat, self._device, self._base.head_weight.dtype)
        return FrozenAdapter(layout, flat, layout.views(flat), weights.spec.scale)


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
