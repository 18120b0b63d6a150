"""CUDA graphs of pure decode steps, one per number of rows and set of ranks, captured on first use.

A step of eager kernels is bound by their launches (about 40 to 60 ms for 36 layers); a graph is not. A
graph is used only after its output has matched that of the same step in eager mode.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.page_kernel import Blocks, KernelAttention, KernelTables
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot
from cotrain_workers.engine.decoding.step import Grouped, GroupedLora, Item, MixedStep, looked_up
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.routing import StepRoute

# (ids [1, T], positions [1, T], route) -> hidden states [T, d]
RunModel = Callable[[torch.Tensor, torch.Tensor, StepRoute], torch.Tensor]
# Records some work; returns a function that replays it, and the tensor that holds its output.
Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
Key = tuple[int, tuple[tuple[int, int, int], ...]]  # rows, and `memory_key` of each pool

# One row is padded to two, so it has no graph of its own.
ROWS = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
TOLERANCE = 0.02  # times the largest hidden state: bf16 kernels may sum in another order


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

    def __init__(self, rows: int, max_pages: int, slots: Sequence[int], cache: KvCache) -> None:
        self._size, self._dump = cache.page_tokens, cache.dump
        self._wide = PinnedBuffer(3 * rows, torch.int64, cache.device)
        self._ids, self._positions, self._kv_slots = self._wide.values.reshape(3, rows)
        cuts = [rows, rows * max_pages, *slots]  # lengths, pages and the ends of each pool
        self._narrow = PinnedBuffer(sum(cuts), torch.int32, cache.device)
        self._lengths, blocks, *self._ends = np.split(self._narrow.values, np.cumsum(cuts)[:-1])
        self._blocks = blocks.reshape(rows, max_pages)
        self._blocks.fill(self._dump)
        self._pages: list[list[int]] = [[] for _ in range(rows)]  # current content of `_blocks`
        ids, positions, kv_slots = self._wide.on_device.view(3, rows)
        lengths, pages, *ends = self._narrow.on_device.split_with_sizes(cuts)
        self.ids, self.positions = ids[None], positions[None]  # int64 [1, rows]
        self.tables = graph_tables(kv_slots, lengths, pages.view(rows, max_pages), cache)
        self.slot_ends: Sequence[torch.Tensor] = ends  # per pool, int32 [slots]

    def fill(self, items: Sequence[Item], pools: Sequence[Pool], chosen: torch.Tensor | None) -> None:
        """Write the inputs of a step and send them; unused rows write to the dump page.

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
        slots = [item.slot for item in items]
        for pool, ends in zip(pools, self._ends, strict=True):
            row = slot_per_row(slots, pool, left)
            np.cumsum(np.bincount(row, minlength=len(ends)), out=ends)
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


class DecodeGraphs:
    """CUDA graphs of one model. A shape whose graph failed or differed runs eagerly from then on."""

    def __init__(self, run_model: RunModel, cache: KvCache, max_pages: int, record: Record) -> None:
        self.refused: list[str] = []  # reasons why graphs are not used, for the operator
        self._run_model = run_model
        self._cache = cache
        self._max_pages = max_pages
        self._captured: dict[Key, Captured | None] = {}
        self._record = record

    @property
    def used(self) -> int:
        """Return the number of graphs in use."""
        return sum(captured is not None for captured in self._captured.values())

    def run(self, items: Sequence[Item], chosen: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the hidden states of a step, or None if it must run eagerly.

        `chosen` are the last tokens chosen on the device, among them the unread tokens of the sequences.
        """
        if len(items) > ROWS[-1] or any(item.work.is_prompt for item in items):
            return None
        # The rows are sorted by pool.
        pools = list(dict.fromkeys(item.slot.pool for item in items if item.slot is not None))
        rows = next(rows for rows in ROWS if rows >= len(items))
        key = (rows, tuple(memory_key(pool) for pool in pools))
        if key not in self._captured:
            self._forget_moved(key)
            self._captured[key] = self._capture(rows, pools, items, chosen)
        captured = self._captured[key]
        if captured is None:
            return None
        captured.inputs.fill(items, pools, chosen)
        captured.replay()
        return captured.hidden

    def _forget_moved(self, key: Key) -> None:
        """Drop graphs over pools that have been reallocated."""
        now = {lies[0]: lies for lies in key[1]}
        for other in list(self._captured):
            if any(now.get(lies[0], lies) != lies for lies in other[1]):
                del self._captured[other]

    def _capture(
        self, rows: int, pools: Sequence[Pool], items: Sequence[Item], chosen: torch.Tensor | None
    ) -> Captured | None:
        inputs = Inputs(rows, self._max_pages, [len(pool.flat) for pool in pools], self._cache)
        inputs.fill(items, pools, chosen)
        groups = [Grouped(0, rows, pool, ends) for pool, ends in zip(pools, inputs.slot_ends, strict=True)]
        attention = KernelAttention(self._cache, inputs.tables)
        route = MixedStep(attention, GroupedLora(groups))
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
        return Captured(replay, inputs, hidden)


def graph_tables(kv_slots: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, cache: KvCache) -> KernelTables:
    """Return the tables of one generated token per row, for any lengths within the columns of `pages`."""
    rows, columns = pages.shape
    numbers = torch.arange(rows, dtype=torch.int32, device=pages.device)
    spans = torch.stack([numbers, torch.ones_like(numbers), numbers], dim=1)
    blocks = Blocks(spans, lengths, queries=1, longest=columns * cache.page_tokens)
    return KernelTables(kv_slots, pages, [blocks])


def memory_key(pool: Pool) -> tuple[int, int, int]:
    """Return the memory of a pool that a graph reads: rank, address, number of slots."""
    return pool.layout.rank, pool.flat.data_ptr(), len(pool.flat)


def slot_per_row(slots: Sequence[Slot | None], pool: Pool, left: int) -> list[int]:
    """Return the slot of a pool for each row, followed by `left` filler rows, in ascending order.

    Rows of other pools use a slot of zeros: the first one before the rows of this pool, else the last.
    """
    before, last, found = True, len(pool.flat) - 1, []
    for slot in slots:
        is_own = slot is not None and slot.pool is pool
        before = before and not is_own
        found.append(slot.index if slot is not None and is_own else 0 if before else last)
    return found + [last] * left


class CudaRecorder:
    """Recorder of CUDA graphs that share one memory pool, as only one output is needed at a time."""

    def __init__(self) -> None:
        self._memory: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Return a replay function and its output; warm up in a side stream, then capture.

        The warm-up is needed because libraries allocate on first use.
        """
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may synchronize during the capture; in this mode neither of the two fails.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            hidden = work()
        return graph.replay, hidden
