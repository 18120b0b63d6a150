"""Forward pass of a decoder step: prompt pages and generated tokens in one packed row, eagerly or as a CUDA graph.

Graphs are for steps of generated tokens alone, one graph per number of rows, captured on first use. A step of eager
kernels is bound by their launches (about 40 to 60 ms for 36 layers); a graph is not. A graph is used only after its
output has matched that of the same step in eager mode. It runs any adapters, in any slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from cotrain_workers.engine.decoding.expert_check import fused_units
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.lora_kernel import (
    FAMILIES,
    KernelLora,
    LoraTables,
    lora_kernel_is_right,
    lora_kernel_takes,
    lora_tables,
    siblings_of,
    tile_rows,
    write_tiles,
)
from cotrain_workers.engine.decoding.page_kernel import (
    KernelAttention,
    graph_tables,
    kernel_is_right,
    kernel_tables,
    kernel_takes,
)
from cotrain_workers.engine.decoding.paged_attention import PagedAttention, StepStates, positions
from cotrain_workers.engine.decoding.sequence_pages import Plan
from cotrain_workers.engine.decoding.slot_pool import Slot
from cotrain_workers.engine.decoding.step import Item, Lora, MixedStep, RowLora, SlotOf, arrange, looked_up, padded
from cotrain_workers.engine.decoding.step_experts import Sizes, Units, experts_of_step, sizes_of
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.base_model import BaseModel, run_backbone
from cotrain_workers.engine.model.families import UNEMBED
from cotrain_workers.engine.model.unembedding import capped, raw_logits
from cotrain_workers.engine.model.vision import image_rows
from cotrain_workers.engine.routing import ImageRows, StepRoute
from cotrain_workers.engine.spec import has_experts

# (ids [1, T], positions [1, T], route) -> hidden states [T, d]
RunModel = Callable[[torch.Tensor, torch.Tensor, StepRoute], torch.Tensor]
# Records some work; returns a function that replays it, and the tensor that holds its output.
Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
# Returns the LoRA of a step, given its tables.
KernelLoraOf = Callable[[LoraTables], KernelLora]

# One row is padded to two, so it has no graph of its own.
ROWS = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
FIRST_RANK = 128  # largest rank of graphs, until an adapter has a larger one
TOLERANCE = 0.02  # times the largest hidden state: bf16 kernels may sum in another order


@dataclass(frozen=True)
class ForwardResult:
    """Results of the base model in a step."""

    hidden: torch.Tensor  # [T, d]
    items: Sequence[Item]
    routes: torch.Tensor | None = None  # int16 [T, layers, k], as routers chose; None without experts

    def routes_on_host(self) -> np.ndarray | None:
        """Return the routes if a page of a prompt stores them or a request wants them. Waits for the device."""
        work = [item.work for item in self.items]
        if not any(each.is_prompt or each.sequence.group.request.return_routed_experts for each in work):
            return None
        return None if self.routes is None else self.routes.cpu().numpy()


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
        self._kernel_lora: KernelLoraOf | None = None
        self._units = fused_units(base)
        # In a loop over experts, the host counts the rows of each, and each step has other states. A graph records neither.
        loops = has_experts(base.targets) and not self._units
        if not loops and lora_kernel_takes(weight) and lora_kernel_is_right(base.targets, self._device, weight.dtype):
            siblings = {target.name: own for own in siblings_of(base.targets) for target in own.targets}
            self._kernel_lora = partial(KernelLora, siblings, base.router.linears)
            if self._has_kernel and not base.states:
                recorder, lora_of = CudaRecorder(), self._kernel_lora
                self.graphs = DecodeGraphs(self._run_model, cache, max_pages, recorder, lora_of, self._units)

    def forward(self, plan: Plan, slot_of: SlotOf, chosen: torch.Tensor | None = None) -> ForwardResult | None:
        """Compute a plan's rows and chunks; None if it has none.

        `chosen` are the tokens, on the device, that the sequences' unread ones are among.
        """
        items = arrange(plan, slot_of)
        if not items:
            return None
        has_images = any(item.work.sequence.group.request.images for item in items)
        if self.graphs is not None and not has_images:
            found = self.graphs.run(items, chosen)
            if found is not None:
                return found
        tokens = [item.work.sequence.token(at) for item in items for at in positions(item.span)]
        rotary = _rotary_of(items, has_images=has_images)
        filler = padded(len(tokens)) - len(tokens)
        ids = to_device(torch.tensor([tokens + [0] * filler]), self._device)
        rotary = np.pad(rotary, ((0, 0), (0, filler)))
        at = to_device(rotary, self._device)
        at = at[:, None] if has_images else at
        if chosen is not None:
            ids = looked_up(ids, chosen)
        images = image_rows(_images_of(items), self._device) if has_images else None
        route = self._route(items, ids.shape[1])
        hidden = self._run_model(ids, at, route, images)
        return ForwardResult(hidden, items, route.routes)

    def _route(self, items: Sequence[Item], total: int) -> MixedStep:
        slots = [item.slot for item in items for _ in positions(item.span)]
        spans = [item.span for item in items]
        rows = [item.span for item in items if not item.work.is_prompt]
        chunks = [item.span for item in items if item.work.is_prompt]
        states = StepStates(self._cache, rows, chunks, total) if self._cache.states else None
        experts = None
        if self._units:
            is_prompt = [item.work.is_prompt for item in items for _ in positions(item.span)]
            experts = experts_of_step(self._units, slots, is_prompt, total, self._device)
        if self._has_kernel:
            tables = kernel_tables(spans, self._cache, self._group, self._device)
            return MixedStep(KernelAttention(self._cache, tables), self._lora(slots), states, experts)
        plain = PagedAttention(self._cache, rows, chunks, self._device)
        return MixedStep(plain, self._lora(slots), states, experts)

    def _lora(self, slots: list[Slot | None]) -> Lora:
        """Return the adapters of some rows: as the last step had them, if no row joined or left."""
        if self._kernel_lora is not None:
            return self._kernel_lora(lora_tables(slots, self._device))
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


def _rotary_of(items: Sequence[Item], *, has_images: bool) -> np.ndarray:
    """Return the rotary positions of a step `[1, T]`, or `[3, T]` with images."""
    if not has_images:
        return np.array([[at for item in items for at in positions(item.span)]], np.int64)
    spans = [(item.work.sequence, item.span) for item in items]
    return np.concatenate([each.rotary_positions(span.start, span.stop) for each, span in spans], 1)


def _images_of(items: Sequence[Item]) -> list[tuple[int, torch.Tensor]]:
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
        hidden = run_backbone(base, ids, positions)[0]
    route.end()
    return hidden


class PinnedBuffer:
    """Integer array on the host and its copy on the device, sent in one transfer."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=dtype)
        self.on_device = torch.zeros(size, dtype=dtype, device=device)
        self.values: np.ndarray = self._host.numpy()

    def send(self) -> None:
        """Copy all values to the device without waiting for pending work."""
        self.on_device.copy_(to_device(self._host, self.on_device.device), non_blocking=True)


class Inputs:
    """Graph inputs that change with each step, in tensors with fixed addresses.

    Their host side is updated in place, and only where a step differs.
    """

    def __init__(self, rows: int, max_pages: int, largest: int, cache: KvCache) -> None:
        self._size, self._dump = cache.page_tokens, cache.dump
        tiles = (len(FAMILIES), 1 + rows, 4)  # a tile for each row, at most
        cuts = [3 * rows, prod(tiles)]
        self._wide = PinnedBuffer(sum(cuts), torch.int64, cache.device)
        of_rows, of_tiles = np.split(self._wide.values, cuts[:1])
        self._ids, self._positions, self._kv_slots = of_rows.reshape(3, rows)
        self._tiles = of_tiles.reshape(tiles)
        self._narrow = PinnedBuffer(rows * (1 + max_pages), torch.int32, cache.device)
        self._lengths, blocks = np.split(self._narrow.values, [rows])
        self._blocks = blocks.reshape(rows, max_pages)
        self._blocks.fill(self._dump)
        self._pages: list[list[int]] = [[] for _ in range(rows)]  # current content of `_blocks`
        on_device, tiles_on_device = self._wide.on_device.split_with_sizes(cuts)
        ids, positions, kv_slots = on_device.view(3, rows)
        lengths, pages = self._narrow.on_device.split_with_sizes([rows, rows * max_pages])
        self.ids, self.positions = ids[None], positions[None]  # int64 [1, rows]
        self.tables = graph_tables(kv_slots, lengths, pages.view(rows, max_pages), cache)
        self.lora = LoraTables(tiles_on_device.view(tiles), [rows] * len(FAMILIES), largest)

    def fill(self, items: Sequence[Item], chosen: torch.Tensor | None) -> None:
        """Write the inputs of a step and send them; unused rows write to the dump page and have no adapter.

        Its tokens may be among `chosen`, on the device.
        """
        n, left = len(items), len(self._ids) - len(items)
        for at, item in enumerate(items):
            self._set_pages(at, item.span.pages)
        for at in range(n, len(self._ids)):
            self._set_pages(at, ())
        starts = np.fromiter((item.span.start for item in items), np.int64, n)
        self._ids[:n] = [item.work.sequence.token(item.span.start) for item in items]
        self._ids[n:] = 0
        self._positions[:n], self._positions[n:] = starts, 0
        pages = self._blocks[np.arange(n), starts // self._size]
        self._kv_slots[:n] = pages.astype(np.int64) * self._size + starts % self._size
        self._kv_slots[n:] = self._dump * self._size + np.arange(left)
        self._lengths[:n], self._lengths[n:] = starts + 1, 1
        write_tiles(self._tiles, tile_rows([item.slot for item in items]))
        self._wide.send()
        self._narrow.send()
        if chosen is not None:
            self.ids.copy_(looked_up(self.ids, chosen))

    def _set_pages(self, at: int, pages: Sequence[int]) -> None:
        """Set the pages of a row. Most rows have the pages of the previous step."""
        had = self._pages[at]
        if had != pages:
            self._blocks[at, len(pages) : len(had)] = self._dump
            self._blocks[at, : len(pages)] = pages
            self._pages[at] = list(pages)


@dataclass(frozen=True)
class Captured:
    """A graph, its inputs and its output."""

    replay: Callable[[], None]
    inputs: Inputs
    hidden: torch.Tensor  # [rows, d]
    route: MixedStep


class DecodeGraphs:
    """CUDA graphs of one model. A shape whose graph failed or differed runs eagerly from then on."""

    def __init__(
        self,
        run_model: RunModel,
        cache: KvCache,
        max_pages: int,
        record: Record,
        lora_of: KernelLoraOf,
        units: Mapping[str, Units] = MappingProxyType({}),
    ) -> None:
        self.refused: list[str] = []  # reasons why graphs are not used, for the operator
        self._run_model = run_model
        self._cache = cache
        self._max_pages = max_pages
        self._captured: dict[tuple[int, Sizes], Captured | None] = {}  # by number of rows and sizes
        self._largest = FIRST_RANK  # of the adapters that the graphs take
        self._record = record
        self._lora_of = lora_of
        self._units = units

    @property
    def used(self) -> int:
        """Return the number of graphs in use."""
        return sum(captured is not None for captured in self._captured.values())

    def run(self, items: Sequence[Item], chosen: torch.Tensor | None = None) -> ForwardResult | None:
        """Return the results of a step, or None if it must run eagerly.

        `chosen` are the last tokens chosen on the device, among them the unread tokens of the sequences.
        """
        if len(items) > ROWS[-1] or any(item.work.is_prompt for item in items):
            return None
        rank = max((item.slot.pool.layout.rank for item in items if item.slot is not None), default=0)
        if rank > self._largest:
            self._largest = rank
            self._captured.clear()
        rows = next(rows for rows in ROWS if rows >= len(items))
        key = rows, self._sizes(items)
        if key not in self._captured:
            self._captured[key] = self._capture(rows, items, chosen)
        captured = self._captured[key]
        if captured is None:
            return None
        captured.inputs.fill(items, chosen)
        captured.route.replace_adapters(items)
        captured.replay()
        return ForwardResult(captured.hidden, items, captured.route.routes)

    def _sizes(self, items: Sequence[Item]) -> Sizes:
        """Return the properties of a step that the launches of its experts depend on; the same without experts."""
        return sizes_of(item.slot for item in items)._replace(rank=self._largest) if self._units else Sizes()

    def _capture(self, rows: int, items: Sequence[Item], chosen: torch.Tensor | None) -> Captured | None:
        inputs = Inputs(rows, self._max_pages, self._largest, self._cache)
        inputs.fill(items, chosen)
        experts = None
        if self._units:
            slots = [item.slot for item in items]
            none_is_prompt = [False] * len(slots)
            device = self._cache.device
            experts = experts_of_step(self._units, slots, none_is_prompt, rows, device, self._sizes(items))
        attention = KernelAttention(self._cache, inputs.tables)
        route = MixedStep(attention, self._lora_of(inputs.lora), experts=experts)
        # Not a method of this object, which would create a cycle: dropping a decoder frees its memory at once.
        work = partial(self._run_model, inputs.ids, inputs.positions, route)

        try:
            expected = work().clone()
            replay, hidden = self._record(work)
            replay()
        except RuntimeError as error:
            self.refused.append(f"{rows} rows: {str(error).splitlines()[0]}")
            return None
        expected, found = (x[: len(items)].float() for x in (expected, hidden))
        # Rows of an adapter that overflows are ignored, so that the other tenants keep their graph.
        good = torch.isfinite(expected).all(dim=-1, keepdim=True)
        gap = float((found - expected).where(good, 0).abs().amax())
        largest = float(expected.where(good, 0).abs().amax())
        if not gap <= TOLERANCE * largest:
            self.refused.append(f"{rows} rows: hidden states differ by {gap:.3g} of {largest:.3g}")
            return None
        return Captured(replay, inputs, hidden, route)


class CudaRecorder:
    """Recorder of CUDA graphs that share one memory pool, as only one output is needed at a time."""

    def __init__(self) -> None:
        self._graphs = WeakSet[Any]()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Return a replay function and its output; warm up in a side stream, then capture.

        The warm-up is needed because libraries allocate on first use.
        """
        current: Any = torch.cuda.current_stream()
        side: Any = torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()
        current.wait_stream(side)
        graph: Any = torch.cuda.CUDAGraph()
        # A pool ends with its last graph, and torch may then refuse to capture into it.
        memory = next((other.pool() for other in self._graphs), None) or torch.cuda.graph_pool_handle()
        # A capture that fails stays on its stream; the outer block returns to the current one.
        # Another thread may synchronize during the capture; in this mode neither of the two fails.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"),
        ):
            hidden = work()
        self._graphs.add(graph)
        return graph.replay, hidden
