"""One forward pass of a decoder step: prompt pages and generated tokens in one packed row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cotrain_workers.engine.decoding.cuda_graphs import CudaRecorder, DecodeGraphs
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.page_kernel import KernelAttention, kernel_is_right, kernel_tables, kernel_takes
from cotrain_workers.engine.decoding.paged_attention import PagedAttention, StepStates, positions
from cotrain_workers.engine.decoding.sequence_pages import Plan
from cotrain_workers.engine.decoding.slot_pool import Slot
from cotrain_workers.engine.decoding.step import (
    Item,
    Lora,
    MixedStep,
    RowLora,
    arrange,
    grouped_lora,
    groups_take,
    looked_up,
    padded,
)
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.model.unembedding import capped, raw_logits
from cotrain_workers.engine.model.vision import image_rows
from cotrain_workers.engine.routing import ImageRows, StepRoute
from cotrain_workers.engine.spec import has_experts


@dataclass(frozen=True)
class Forward:
    """Results of the base model in a step."""

    hidden: torch.Tensor  # [T, d]
    items: Sequence[Item]
    experts: np.ndarray | None = None  # int16 [T, layers, k], as routers chose; None without experts


class ModelRunner:
    """Runs steps over one base model and one key-value memory."""

    def __init__(self, base: BaseModel, cache: KvCache, max_pages: int) -> None:
        self.graphs: DecodeGraphs | None = None
        self._base = base
        self._cache = cache
        self._device = base.head_weight.device
        self._last_slots: list[tuple[Slot, int] | None] = []
        self._last_lora = RowLora([], self._device)
        # No method of this object: dropping it frees its memory at once.
        self._run_model = partial(run_model, base)
        weight = base.head_weight
        heads = base.query_heads
        self._group = heads // base.kv.heads
        self._has_kernel = (
            not base.kv.others
            and not base.has_sinks
            and kernel_takes(weight, base.kv.head_dim, cache.page_tokens)
            and kernel_is_right(base.kv, heads, cache.page_tokens, self._device, weight.dtype, base.score_softcap)
        )
        # The rows of each expert are counted on the host, and each step has other states. A graph records neither.
        self._has_experts = has_experts(base.targets)
        is_fixed = not self._has_experts and not base.states
        if self._has_kernel and is_fixed and groups_take(weight, []):
            self.graphs = DecodeGraphs(self._run_model, cache, max_pages, CudaRecorder())

    def forward(
        self, plan: Plan, slot_of: Mapping[str | None, Slot | None], chosen: torch.Tensor | None = None
    ) -> Forward | None:
        """Compute a plan's rows and chunks; None if it has none.

        `chosen` are the tokens, on the device, that the sequences' unread ones are among.
        """
        items = arrange(plan, slot_of)
        if not items:
            return None
        has_images = any(item.work.sequence.group.request.images for item in items)
        hidden = None
        if self.graphs is not None and not has_images:
            hidden = self.graphs.run(items, chosen)
        if hidden is None:
            tokens = [item.work.sequence.token(at) for item in items for at in positions(item.span)]
            rotary = rotary_of(items, has_images=has_images)
            filler = padded(len(tokens)) - len(tokens)
            ids = to_device(torch.tensor([tokens + [0] * filler]), self._device)
            rotary = np.pad(rotary, ((0, 0), (0, filler)))
            at = to_device(rotary, self._device)
            at = at[:, None] if has_images else at
            if chosen is not None:
                ids = looked_up(ids, chosen)
            images = image_rows(images_of(items), self._device) if has_images else None
            route = self._route(items, ids.shape[1])
            hidden = self._run_model(ids, at, route, images)
            if route.experts:
                return Forward(hidden, items, np.stack(route.experts, axis=1))
        return Forward(hidden, items)

    def _route(self, items: Sequence[Item], total: int) -> MixedStep:
        slots = [item.slot for item in items for _ in positions(item.span)]
        spans = [item.span for item in items]
        rows = [item.span for item in items if not item.work.is_prompt]
        chunks = [item.span for item in items if item.work.is_prompt]
        states = StepStates(self._cache, rows, chunks, total) if self._cache.states else None
        if self._has_kernel:
            tables = kernel_tables(spans, self._cache, self._group, self._device)
            return MixedStep(KernelAttention(self._cache, tables), self._lora(slots), states)
        plain = PagedAttention(self._cache, rows, chunks, self._device)
        return MixedStep(plain, self._lora(slots), states)

    def _lora(self, slots: list[Slot | None]) -> Lora:
        """Return the adapters of some rows: as the last step had them, if no row joined or left."""
        if not self._has_experts and groups_take(self._base.head_weight, slots):
            return grouped_lora(slots, self._device)
        taken = [None if slot is None else (slot, slot.index) for slot in slots]
        if self._last_slots != taken:
            self._last_slots, self._last_lora = taken, RowLora(slots, self._device)
        return self._last_lora

    def logits(self, hidden: torch.Tensor, slots: list[Slot | None]) -> torch.Tensor:
        """Return the raw logits of `n` hidden states `[n, d]`, sorted by slot: `[n padded, V]`, fp32."""
        n = len(slots)
        rows = torch.cat([hidden, hidden.new_zeros(padded(n) - n, hidden.shape[1])])
        logits = raw_logits(rows, self._base.head_weight)
        self._lora(slots).add(UNEMBED, rows, logits)
        return capped(logits, self._base.final_softcap)


def rotary_of(items: Sequence[Item], *, has_images: bool) -> np.ndarray:
    """Return the rotary positions of a step `[1, T]`, or `[3, T]` with images."""
    if not has_images:
        return np.array([[at for item in items for at in positions(item.span)]], np.int64)
    spans = [(item.work.sequence, item.span) for item in items]
    return np.concatenate([each.rotary_positions(span.start, span.stop) for each, span in spans], 1)


def images_of(items: Sequence[Item]) -> list[tuple[int, torch.Tensor]]:
    """Return the parts of images in a step, each with its first row."""
    found = []
    for work, span, _ in items:
        group = work.sequence.group
        for image, features in zip(group.request.images, group.features, strict=True):
            start = max(span.start, image.start)
            stop = min(span.stop, image.start + image.tokens)
            if start < stop:
                part = features[:, start - image.start : stop - image.start]
                found.append((span.row + start - span.start, part))
    return found


def run_model(
    base: BaseModel, ids: torch.Tensor, positions: torch.Tensor, route: StepRoute, images: ImageRows | None = None
) -> torch.Tensor:
    """Map token ids `[1, T]` and positions, `[1, T]` or `[3, 1, T]`, to hidden states `[T, d]`."""
    with base.router.use_step(route, images):
        output = base.backbone(
            input_ids=ids,
            position_ids=positions,
            # Given a mask of four dimensions, transformers builds none; ours is not looked at.
            attention_mask=ids.new_zeros(1, 1, 1, 1),
            use_cache=False,
        )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden
