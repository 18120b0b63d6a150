"""CUDA graphs of pure decode steps: one per number of rows and set of ranks, captured when first wanted.

A step of eager kernels is bound by their launches (about 40 to 60 ms for 36 layers); a graph is not. A
graph is used only after its output was compared with that of the same step run eagerly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cotrain_workers.engine.decoding.cuda_kernels import (
    Contract,
    Grouped,
    GroupedLora,
    KernelAttention,
    KernelTables,
    key_offsets,
    slot_ends,
)
from cotrain_workers.engine.decoding.step import Chunk, MixedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_workers.engine.decoding.adapter_slots import Pool, Slot
    from cotrain_workers.engine.decoding.kv_cache import KvCache
    from cotrain_workers.engine.decoding.step import Item
    from cotrain_workers.engine.routing import StepRoute

    # (ids [1, T], positions [1, T], route) -> hidden states [T, d]
    RunModel = Callable[[torch.Tensor, torch.Tensor, StepRoute], torch.Tensor]
    # Records some work; returns what repeats it, and where its output then is.
    Record = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
    Key = tuple[int, tuple[tuple[int, int, int], ...]]  # rows, and where the pools lie

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
TOLERANCE = 0.02  # of the largest hidden state: bf16 kernels that sum in another order


@dataclass(frozen=True)
class Inputs:
    """What changes from step to step, in tensors that stay."""

    ids: torch.Tensor  # int64 [1, rows]
    positions: torch.Tensor  # int64 [1, rows]
    tables: KernelTables
    slot_ends: Sequence[torch.Tensor]  # of each pool, int32 [slots]


@dataclass(frozen=True)
class Captured:
    """A graph, its inputs and its output."""

    replay: Callable[[], None]
    inputs: Inputs
    hidden: torch.Tensor  # [rows, d]


class DecodeGraphs:
    """The graphs of one model; a shape whose graph failed or differed runs eagerly from then on."""

    def __init__(
        self,
        run_model: RunModel,
        cache: KvCache,
        most_pages: int,
        contract: Contract,
        record: Record,
    ) -> None:
        self.refused: list[str] = []  # why a graph is not used, for the operator
        self._run_model = run_model
        self._cache = cache
        self._most_pages = most_pages
        self._contract = contract
        self._captured: dict[Key, Captured | None] = {}
        self._record = record

    @property
    def used(self) -> int:
        """Return the number of graphs in use."""
        return sum(captured is not None for captured in self._captured.values())

    def run(self, items: Sequence[Item]) -> torch.Tensor | None:
        """Return the hidden states of a step, or None if it must run eagerly."""
        if len(items) > ROWS[-1] or any(isinstance(item.work, Chunk) for item in items):
            return None
        # The rows are sorted by pool.
        pools = list(dict.fromkeys(item.slot.pool for item in items if item.slot is not None))
        rows = next(rows for rows in ROWS if rows >= len(items))
        key = (rows, tuple(lies_at(pool) for pool in pools))
        if key not in self._captured:
            self._forget_moved(key)
            self._captured[key] = self._capture(rows, pools, items)
        captured = self._captured[key]
        if captured is None:
            return None
        self._fill(captured.inputs, items, pools)
        captured.replay()
        return captured.hidden

    def _forget_moved(self, key: Key) -> None:
        """Drop the graphs over pools that have grown since, and lie elsewhere."""
        now = {lies[0]: lies for lies in key[1]}
        for other in list(self._captured):
            if any(now.get(lies[0], lies) != lies for lies in other[1]):
                del self._captured[other]

    def _capture(self, rows: int, pools: Sequence[Pool], items: Sequence[Item]) -> Captured | None:
        inputs = self._inputs(rows, pools)
        self._fill(inputs, items, pools)
        groups = [
            Grouped(0, rows, pool, ends) for pool, ends in zip(pools, inputs.slot_ends, strict=True)
        ]
        attention = KernelAttention(self._cache, inputs.tables, self._contract)
        route = MixedStep(attention, GroupedLora(groups))
        # No method of this object, which will hold it: dropping a decoder frees its memory at once.
        work = partial(self._run_model, inputs.ids, inputs.positions, route)

        try:
            expected = work().clone()
            replay, hidden = self._record(work)
            replay()
        except RuntimeError as error:
            self.refused.append(f"{rows} rows: {str(error).splitlines()[0]}")
            return None
        expected, found = (x[: len(items)].float() for x in (expected, hidden))
        # Rows of an adapter that overflows prove nothing, and must not cost the others their graph.
        good = torch.isfinite(expected).all(dim=-1, keepdim=True)
        gap = float((found - expected).where(good, 0).abs().amax())
        largest = float(expected.where(good, 0).abs().amax())
        if not gap <= TOLERANCE * largest:
            self.refused.append(f"{rows} rows: hidden states differ by {gap:.3g} of {largest:.3g}")
            return None
        return Captured(replay, inputs, hidden)

    def _inputs(self, rows: int, pools: Sequence[Pool]) -> Inputs:
        device, most_keys = self._cache.device, self._most_pages * self._cache.page_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        tables = KernelTables(
            kv_slots=zeros(rows),
            offsets=torch.arange(rows + 1, dtype=torch.int32, device=device),
            key_offsets=key_offsets(rows, most_keys, device),
            lengths=zeros(rows, dtype=torch.int32),
            blocks=zeros(rows, self._most_pages, dtype=torch.int32),
            most_queries=1,
            most_keys=most_keys,
        )
        ends = [zeros(len(pool.flat), dtype=torch.int32) for pool in pools]
        return Inputs(zeros(1, rows), zeros(1, rows), tables, ends)

    def _fill(self, inputs: Inputs, items: Sequence[Item], pools: Sequence[Pool]) -> None:
        """Copy a step into the inputs; the rows left over belong to no sequence and write to the dump."""
        size, dump = self._cache.page_tokens, self._cache.dump
        left = inputs.ids.shape[1] - len(items)
        starts = [item.span.start for item in items]
        tokens = [item.work.sequence.token(at) for item, at in zip(items, starts, strict=True)]
        kv_slots = [
            item.span.pages[at // size] * size + at % size
            for item, at in zip(items, starts, strict=True)
        ]
        kv_slots += [dump * size + at for at in range(left)]
        blocks = [
            [*item.span.pages, *[dump] * (self._most_pages - len(item.span.pages))]
            for item in items
        ]
        blocks += [[dump] * self._most_pages] * left
        put(inputs.ids[0], tokens + [0] * left)
        put(inputs.positions[0], starts + [0] * left)
        put(inputs.tables.kv_slots, kv_slots)
        put(inputs.tables.lengths, [at + 1 for at in starts] + [1] * left)
        put(inputs.tables.blocks, blocks)
        slots = [item.slot for item in items]
        for pool, ends in zip(pools, inputs.slot_ends, strict=True):
            put(ends, slot_ends(whole_row(slots, pool, left), pool))


def lies_at(pool: Pool) -> tuple[int, int, int]:
    """Name the memory that a graph over a pool reads: rank, address, slots."""
    return pool.layout.rank, pool.flat.data_ptr(), len(pool.flat)


def whole_row(slots: Sequence[Slot | None], pool: Pool, left: int) -> list[int]:
    """Return which slot of a pool each row takes, `left` of filler included, in ascending order.

    Rows of other adapters take a slot of zeros: the first one before those of the pool, else the last.
    """
    before, last, found = True, len(pool.flat) - 1, []
    for slot in slots:
        is_own = slot is not None and slot.pool is pool
        before = before and not is_own
        found.append(slot.index if slot is not None and is_own else 0 if before else last)
    return found + [last] * left


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: only one output is needed at a time."""

    def __init__(self) -> None:
        self._memory: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Warm up in a side stream (libraries allocate on first use), then capture."""
        side: Any = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Another thread may wait for its copies in between: that must end neither capture nor thread.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            hidden = work()
        return graph.replay, hidden


def put(target: torch.Tensor, values: Sequence[int] | Sequence[Sequence[int]]) -> None:
    """Copy numbers into a tensor on the device."""
    target.copy_(torch.tensor(values, dtype=target.dtype))
