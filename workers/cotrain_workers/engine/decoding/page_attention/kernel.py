"""Attention over the pages of a KV cache as the torch op `cotrain::attend_pages`, and its tile sizes.

The kernels are in `programs.py`. Sizes follow from the model and the pages alone, never from measured times, so
that two workers have the same bits.
"""

from typing import Any, NamedTuple

import torch

from cotrain_workers.engine.lora.fused.operators import missing_kernels
from cotrain_workers.engine.model.kept_norm import block

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

_LIBRARY = torch.library.Library("cotrain", "FRAGMENT")
# Queries and `out` are [T, heads, d]. Keys and values are [pages, page tokens, key-value heads, d].
# Sinks are [heads]. Spans, int32 [b, 3], have the first row of a block, its number of queries and its row of `pages`.
# Lengths, int32 [b], have the keys that its first query sees, itself included. They are `longest` at most.
# Pages are int32 [sequences, columns]. A cap of 0 is no cap.
_SCHEMA = (
    "attend_pages(Tensor q, Tensor keys, Tensor values, Tensor(a!) out, Tensor? sinks, Tensor spans, Tensor lengths, "
    "Tensor pages, int queries, int longest, int? window, float scale, float cap) -> ()"
)


class Sizes(NamedTuple):
    """Tile sizes of a launch."""

    rows: int
    keys: int
    columns: int
    split: int
    most: int


def lacking(dtype: torch.dtype, head_dim: int, page_tokens: int, device: torch.device) -> str:
    """Return why the kernel cannot run, or an empty string."""
    if dtype not in TYPES:
        return f"no kernel for {dtype}"
    if head_dim % 16 or head_dim > 256:
        return f"no kernel for heads of {head_dim} values"
    if page_tokens % LEAST_KEYS:
        return f"no kernel for pages of {page_tokens} tokens"
    return missing_kernels(device) or ""


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


def attend_pages(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    spans: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    queries: int,
    longest: int,
    window: int | None,
    scale: float,
    cap: float,
) -> None:
    """Write the attention of blocks of `queries` queries at most to `out`; other rows stay.

    Blocks of one query are generated tokens, whose keys are cut into parts. No part depends on the others' number.
    """
    from cotrain_workers.engine.decoding.page_attention import programs as page_programs

    heads, width = q.shape[1:]
    page, kv_heads = keys.shape[1:3]
    q = q if q.stride(2) == 1 else q.contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    group = heads // kv_heads
    size = sizes(group, width, page, q.element_size(), is_prompt=queries > 1)
    blocks, capacity = len(spans), min(size.most, -(-longest // size.split))
    across = min(capacity, max(1, PROGRAMS // (blocks * kv_heads)))
    # Also for a single part: another type of an unused argument would be another variant of the kernel.
    parts = (blocks, heads, capacity) if size.most > 1 else (0,)
    partial, sums = (out.new_empty(*parts, each, dtype=torch.float32) for each in (width, 2))
    fixed: dict[str, Any] = {"N": size.keys, "BLOCK": size.columns, "SPLIT": size.split}
    fixed |= {"MOST": size.most, "SINKS": sinks is not None, "WIDTH": width}
    seen = window or ALL_KEYS
    given = out, partial, sums, out if sinks is None else sinks, spans, lengths
    page_programs.attend[(blocks, kv_heads, across)](
        q, keys, values, *given, pages, q.stride(0), q.stride(1), pages.stride(0), capacity, seen,
        scale, cap, HEADS=kv_heads, GROUP=group, PAGE=page, M=size.rows, CAPPED=cap > 0,
        WIDE=page_programs.INTERPRETED, **fixed, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if capacity > 1:
        page_programs.combine[(blocks, heads)](*given, capacity, seen, HEADS=heads, **fixed, num_warps=WARPS)


def _write_nothing(*_: Any) -> None:
    pass


_LIBRARY.define(_SCHEMA)
_LIBRARY.impl("attend_pages", attend_pages, "CompositeExplicitAutograd")
torch.library.register_fake("cotrain::attend_pages", _write_nothing, lib=_LIBRARY)
#: `attend_pages` as an op, which tools that follow ops can see.
attend = torch.ops.cotrain.attend_pages
