"""Attention of a decoder step by kernels over the pages of the KV cache: tables, the torch op, and its check.

The op `cotrain::attend_pages` launches the kernels of `page_programs.py`. Tile sizes follow from the model and the
pages alone, never from measured times, so that two workers have the same bits.

`tests/gpu` compares the kernels with `paged_attention.py`, which runs anywhere.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.paged_attention import PagedAttention, Span, kv_slots, positions
from cotrain_workers.engine.device import to_device
from cotrain_workers.engine.lora.fused.operators import missing_kernels, no_result, register
from cotrain_workers.engine.model.configuration import KvShape
from cotrain_workers.engine.model.kernel_check import agrees
from cotrain_workers.engine.model.layer_kernels import block
from cotrain_workers.engine.routing import AttentionRule

#: Keys of one part of a generated token's attention, and the largest number of parts.
SPLIT, MOST = 1024, 32
#: Programs that a launch for generated tokens aims at: several for each multiprocessor of a GPU.
PROGRAMS = 4096
#: Bytes of a block of keys. Two stages of keys and values then leave room for three programs on a multiprocessor.
BLOCK_BYTES = 16 * 1024
#: Rows of a block: queries times the query heads that share keys. Tensor cores take 16 at least.
ROW_ROWS, PROMPT_ROWS, PROMPT_ROWS_FP32 = 16, 64, 16
LEAST_KEYS = 16
WARPS, STAGES = 4, 3
ALL_KEYS = 2**30  # a window without a limit
TYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Relative to the largest value of a row; probabilities are rounded to the type of the values.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}

log = logging.getLogger(__name__)


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
    step = queries_per_block(group, cache.dtype.itemsize)
    # First row, number of queries, keys of the first query, and number of the span:
    rows: list[tuple[int, int, int, int]] = []
    prompts: list[tuple[int, int, int, int]] = []
    for number, span in enumerate(spans):
        to = rows if len(positions(span)) == 1 else prompts
        for at in range(span.start, span.stop, step):
            to.append((span.row + at - span.start, min(step, span.stop - at), at + 1, number))

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
    return KernelTables(to_device(torch.tensor(kv_slots(spans, size)), device), int32(pages), launches)


def graph_tables(kv_slots: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, cache: KvCache) -> KernelTables:
    """Return the tables of one generated token per row, for any lengths within the columns of `pages`."""
    rows, columns = pages.shape
    numbers = torch.arange(rows, dtype=torch.int32, device=pages.device)
    spans = torch.stack([numbers, torch.ones_like(numbers), numbers], dim=1)
    blocks = Blocks(spans, lengths, queries=1, longest=columns * cache.page_tokens)
    return KernelTables(kv_slots, pages, [blocks])


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
            call = PagesCall(
                q, *self._cache.paged(layer), out, each.spans, each.lengths, tables.pages,
                each.queries, each.longest, rule.window, rule.scaling, rule.softcap or 0.0,
            )  # fmt: skip
            attend(*call)
        return out


class PagesCall(NamedTuple):
    """Arguments of the op `cotrain::attend_pages`, in the order of its schema."""

    q: torch.Tensor  # [T, heads, d]
    keys: torch.Tensor  # [pages, page tokens, key-value heads, d]
    values: torch.Tensor
    out: torch.Tensor  # [T, heads, d], written
    spans: torch.Tensor  # int32 [b, 3]: first row of a block, number of its queries, row of `pages`
    lengths: torch.Tensor  # int32 [b]: keys that the first query of a block sees, itself included
    pages: torch.Tensor  # int32 [sequences, columns]
    queries: int  # per block at most; 1: generated tokens
    longest: int  # bound of `lengths`
    window: int | None
    scale: float
    cap: float  # 0: none


_SCHEMA = (
    "(Tensor q, Tensor keys, Tensor values, Tensor(a!) out, Tensor spans, Tensor lengths, "
    "Tensor pages, int queries, int longest, int? window, float scale, float cap) -> ()"
)


class Sizes(NamedTuple):
    """Tile sizes of a launch."""

    rows: int
    keys: int
    columns: int
    split: int
    most: int


def sizes(group: int, head_dim: int, page_tokens: int, item: int, *, is_prompt: bool) -> Sizes:
    """Return the tile sizes for `group` query heads per key-value head and values of `item` bytes."""
    columns = block(head_dim)
    keys = max(LEAST_KEYS, min(128, BLOCK_BYTES // (columns * item)))
    while page_tokens % keys:
        keys //= 2
    least = (PROMPT_ROWS_FP32 if item > 2 else PROMPT_ROWS) if is_prompt else ROW_ROWS
    rows = max(least, block(group))
    return Sizes(rows, keys, columns, SPLIT, 1 if is_prompt else MOST)


def queries_per_block(group: int, item: int) -> int:
    """Return the number of queries of a prompt in one block."""
    return max(1, sizes(group, 16, LEAST_KEYS, item, is_prompt=True).rows // group)


def attend_pages(*args: Any) -> None:
    """Write the attention of blocks of queries to `out`, given a `PagesCall`; other rows stay.

    Blocks of one query are generated tokens, whose keys are cut into parts. No part depends on the others' number.
    """
    from cotrain_workers.engine.decoding import page_programs

    call = PagesCall(*args)
    keys, values, pages, out = call.keys, call.values, call.pages, call.out
    heads, width = call.q.shape[1:]
    page, kv_heads = keys.shape[1:3]
    q = call.q if call.q.stride(2) == 1 else call.q.contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    group = heads // kv_heads
    size = sizes(group, width, page, q.element_size(), is_prompt=call.queries > 1)
    blocks, capacity = len(call.spans), min(size.most, -(-call.longest // size.split))
    across = min(capacity, max(1, PROGRAMS // (blocks * kv_heads)))
    # Also for a single part: another type of an unused argument would be another variant of the kernel.
    parts = (blocks, heads, capacity) if size.most > 1 else (0,)
    partial, sums = (out.new_empty(*parts, each, dtype=torch.float32) for each in (width, 2))
    fixed: dict[str, Any] = {"N": size.keys, "BLOCK": size.columns, "SPLIT": size.split}
    fixed |= {"MOST": size.most, "WIDTH": width}
    seen = call.window or ALL_KEYS
    given = out, partial, sums, call.spans, call.lengths
    page_programs.attend[(blocks, kv_heads, across)](
        q, keys, values, *given, pages, q.stride(0), q.stride(1), pages.stride(0), capacity, seen,
        call.scale, call.cap, HEADS=kv_heads, GROUP=group, PAGE=page, M=size.rows, CAPPED=call.cap > 0,
        WIDE=page_programs.INTERPRETED, **fixed, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if capacity > 1:
        page_programs.combine[(blocks, heads)](*given, capacity, seen, HEADS=heads, **fixed, num_warps=WARPS)


register({"attend_pages": _SCHEMA}, [attend_pages], [no_result])
#: `attend_pages` as an op, which tools that follow ops can see.
attend = torch.ops.cotrain.attend_pages


def kernel_takes(weight: torch.Tensor, head_dim: int, page_tokens: int) -> bool:
    """Return True if the kernel over pages can run for this kind of model.

    On CUDA, a negative result is logged with its reason.
    """
    if not weight.is_cuda:
        return False
    reason = _lacking(weight.dtype, head_dim, page_tokens, weight.device)
    if reason:
        log.warning("Decoding is slow here: %s", reason)
    return not reason


def _lacking(dtype: torch.dtype, head_dim: int, page_tokens: int, device: torch.device) -> str:
    """Return why the kernel cannot run, or an empty string."""
    if dtype not in TYPES:
        return f"no kernel for {dtype}"
    if head_dim % 16 or head_dim > 256:
        return f"no kernel for heads of {head_dim} values"
    if page_tokens % LEAST_KEYS:
        return f"no kernel for pages of {page_tokens} tokens"
    return missing_kernels(device) or ""


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

    full = SPLIT // page_tokens + 1  # pages with more keys than one part
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
