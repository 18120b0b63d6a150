"""CUDA implementation of a decoder step: an attention kernel over pages, and LoRA with grouped products.

The CPU tests do not run it. `tests/gpu` compares both with the plain implementations, which run anywhere.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.page_attention import kernel as page_kernel
from cotrain_workers.engine.decoding.paged_attention import PagedAttention, Span, positions
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.model.attention import NARROW
from cotrain_workers.engine.model.base_model import KvShape
from cotrain_workers.engine.model.kernel_check import agrees
from cotrain_workers.engine.routing import AttentionRule

MAX_GROUPS = 1023  # per grouped product

#: Relative to the largest value of a row; probabilities are rounded to the type of the values.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}

log = logging.getLogger(__name__)


def kernel_takes(weight: torch.Tensor, head_dim: int, page_tokens: int) -> bool:
    """Return True if the kernel over pages can run for this kind of model.

    On CUDA, a negative result is logged with its reason.
    """
    if not weight.is_cuda:
        return False
    reason = page_kernel.lacking(weight.dtype, head_dim, page_tokens, weight.device)
    if reason:
        log.warning("Decoding is slow here: %s", reason)
    return not reason


def groups_take(weight: torch.Tensor, slots: Sequence[Slot | None]) -> bool:
    """Return True if the adapters of a step can run as one grouped product per pool."""
    most = max((slot.pool.flat.shape[0] for slot in slots if slot is not None), default=0)
    has_them = hasattr(functional, "grouped_mm")
    return weight.is_cuda and weight.dtype in NARROW and has_them and most <= MAX_GROUPS


@dataclass(frozen=True)
class Blocks:
    """Blocks of queries that one launch attends."""

    spans: torch.Tensor  # int32 [b, 3]: first row, number of queries and row of the page table
    lengths: torch.Tensor  # int32 [b]: keys that the first query sees, itself included
    queries: int  # per block at most; 1: generated tokens
    longest: int  # bound of `lengths`


@dataclass(frozen=True)
class KernelTables:
    """Storage of `n` rows, and the blocks of their queries."""

    kv_slots: torch.Tensor  # int64 [n]
    pages: torch.Tensor  # int32 [spans, pages]
    launches: Sequence[Blocks]


def kernel_tables(spans: Sequence[Span], cache: KvCache, group: int, device: torch.device) -> KernelTables:
    """Return the tables of contiguous spans that start at row 0; `group` query heads share a key-value head.

    A span of one row is a generated token, whose launch is separate so that its bits do not depend on prompts.
    """
    size = cache.page_tokens
    columns = max(-(-span.stop // size) for span in spans)
    pages = [[*span.pages[:columns], *[cache.dump] * (columns - len(span.pages))] for span in spans]
    kv_slots = [span.pages[at // size] * size + at % size for span in spans for at in positions(span)]
    step = page_kernel.queries_per_block(group, cache.dtype.itemsize)
    rows: list[tuple[int, int, int, int]] = []
    prompts: list[tuple[int, int, int, int]] = []
    for number, span in enumerate(spans):
        to = rows if len(positions(span)) == 1 else prompts
        to += [(*block, number) for block in blocks_of(span, step)]

    def int32(values: Any) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int32), device)

    launches = [
        Blocks(
            spans=int32([(row, count, number) for row, count, _, number in blocks]),
            lengths=int32([length for _, _, length, _ in blocks]),
            queries=queries,
            longest=max(length + count - 1 for _, count, length, _ in blocks),
        )
        for blocks, queries in ((rows, 1), (prompts, step))
        if blocks
    ]
    return KernelTables(to_device(torch.tensor(kv_slots), device), int32(pages), launches)


def blocks_of(span: Span, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield first row, number of queries and keys of the first query for blocks of `step` queries."""
    for at in range(span.start, span.stop, step):
        yield span.row + at - span.start, min(step, span.stop - at), at + 1


class KernelAttention:
    """Attention of a step with one launch for generated tokens and one for prompts, per layer."""

    def __init__(self, cache: KvCache, tables: KernelTables) -> None:
        self._cache = cache
        self._tables = tables

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape; rows without a sequence become zero."""
        tables, n = self._tables, len(self._tables.kv_slots)
        self._cache.write(layer, tables.kv_slots, k[:n], v[:n])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if n < len(q):
            out[n:] = 0
        for each in tables.launches:
            page_kernel.attend(
                q, *self._cache.paged(layer), out, None, each.spans, each.lengths, tables.pages,
                each.queries, each.longest, rule.window, rule.scaling, rule.softcap or 0.0,
            )  # fmt: skip
        return out


class Grouped(NamedTuple):
    """Neighbouring rows of one pool, sorted by slot."""

    start: int
    stop: int
    pool: Pool
    ends: torch.Tensor  # int32 [slots]: end of each slot's rows, counted from `start`


class GroupedLora:
    """LoRA of a step with one grouped product per matrix and pool; idle slots are empty groups."""

    def __init__(self, groups: Sequence[Grouped]) -> None:
        self._groups = groups
        self._kept_x: torch.Tensor | None = None  # input of `_kept_lows`, which later siblings use
        self._kept_lows: dict[str, list[torch.Tensor]] = {}

    def add(self, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the LoRA path of `x` `[T, in]` to `y` `[T, out]`, in place.

        Modules that read the same tensor `x` share one product with their stacked A matrices.
        """
        for group, low in zip(self._groups, self._take_lows(module, x), strict=True):
            product = functional.grouped_mm(low, group.pool.stacked_b(module), offs=group.ends)
            y[group.start : group.stop].add_(product[:, : y.shape[1]])

    def _take_lows(self, module: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x A^T` of each group, `[n, rank]`; the first sibling computes it for all siblings."""
        if self._kept_x is not x or module not in self._kept_lows:
            self._kept_x, self._kept_lows = x, {}
            for group in self._groups:
                siblings = group.pool.layout.siblings[module]
                a = group.pool.stacked_a(siblings).transpose(1, 2)
                low = functional.grouped_mm(x[group.start : group.stop], a, offs=group.ends)
                for name, own in zip(siblings, low.chunk(len(siblings), dim=1), strict=True):
                    self._kept_lows.setdefault(name, []).append(own)
        found = self._kept_lows.pop(module, [])
        if not self._kept_lows:
            self._kept_x = None
        return found


def grouped_lora(slots: Sequence[Slot | None], device: torch.device) -> GroupedLora:
    """Return the LoRA groups of rows sorted by pool and slot; rows without an adapter come first."""
    groups, start = [], sum(slot is None for slot in slots)
    while start < len(slots):
        first = slots[start]
        assert first is not None
        own = [slot.index for slot in slots if slot is not None and slot.pool is first.pool]
        ends = np.cumsum(np.bincount(own, minlength=len(first.pool.flat)), dtype=np.int32)
        groups.append(Grouped(start, start + len(own), first.pool, to_device(ends, device)))
        start += len(own)
    return GroupedLora(groups)


def kernel_is_right(
    shape: KvShape, heads: int, page_tokens: int, device: torch.device, dtype: torch.dtype, softcap: float | None
) -> bool:
    """Return True if the kernel matches the plain attention; a failure or a mismatch is logged.

    `heads` is the number of query heads. Raises DeviceLost.
    """
    rules = [AttentionRule(shape.head_dim**-0.5, window, softcap) for window in (None, 8)]

    def measure() -> float:
        return max(difference(shape, heads, page_tokens, device, dtype, rule) for rule in rules)

    what = "The attention kernel over pages, without which decoding is slow,"
    return agrees(what, device, TOLERANCE[dtype], measure)


@torch.no_grad()
def difference(
    shape: KvShape, heads: int, page_tokens: int, device: torch.device, dtype: torch.dtype, rule: AttentionRule
) -> float:
    """Return the maximum difference from plain fp32 attention, relative to the largest value of a row.

    One step computes two generated tokens, one of them with keys in several parts, and the start and the second page
    of a prompt.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, count: int) -> torch.Tensor:
        size = (rows, count, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    full = page_kernel.SPLIT // page_tokens + 1  # pages with more keys than one part
    earlier = list(range(full))[::-1]
    rows = [Span(0, full * page_tokens, full * page_tokens + 1, [*earlier, full])]
    rows.append(Span(1, 0, 1, [full + 1]))
    chunks = [Span(2, 0, 3, [full + 2])]
    chunks.append(Span(5, page_tokens, 2 * page_tokens, [earlier[0], full + 3]))
    pages, steps = full + 4, 5 + page_tokens
    stored = [random(full * page_tokens, shape.heads) for _ in ("keys", "values")]
    given = [random(steps, count) for count in (heads, shape.heads, shape.heads)]
    found: list[torch.Tensor] = []
    for kind in (dtype, torch.float32):
        cache = KvCache(replace(shape, layers=1), pages, page_tokens, device, kind)
        cache.prepare({}, range(pages))
        at = torch.arange(full * page_tokens, device=device)
        cache.write(0, at, *(each.to(kind) for each in stored))
        attention: PagedAttention | KernelAttention = PagedAttention(cache, rows, chunks, device)
        if not found:
            tables = kernel_tables([*rows, *chunks], cache, heads // shape.heads, device)
            attention = KernelAttention(cache, tables)
        q, k, v = (each.to(kind) for each in given)
        found.append(attention.attend(0, q, k, v, rule).double())
    ours, theirs = found
    return float(((ours - theirs).abs().amax((1, 2)) / theirs.abs().amax((1, 2))).max())
