"""A small step that the flash kernel over pages must compute as the plain attention does before it is used."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cotrain_workers.engine.decoding.cuda_kernels import KernelAttention, kernel_tables
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.paged_attention import PagedAttention, Span
from cotrain_workers.engine.routing import AttentionRule

if TYPE_CHECKING:
    from cotrain_workers.engine.model.base_model import KvShape

#: Over the largest value: probabilities rounded to 16 bits.
TOLERANCE = 2e-2

log = logging.getLogger(__name__)


def kernel_is_right(
    shape: KvShape, heads: int, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Compare both over two sequences, one of two pages; if the kernel fails or differs, the log says so.

    `heads` is the number of query heads.
    """
    try:
        found = max(difference(shape, heads, page_tokens, device, dtype, w) for w in (None, 8))
    except Exception:  # its signature moves with each release of torch
        log.exception("Decoding is slow here: the flash kernel over pages cannot run")
        return False
    if not found < TOLERANCE:
        log.error("Decoding is slow here: the flash kernel over pages is off by %.3g", found)
    return found < TOLERANCE


@torch.no_grad()
def difference(
    shape: KvShape,
    heads: int,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
) -> float:
    """Return how far the two lie apart, over the largest value."""
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, count: int) -> torch.Tensor:
        size = (rows, count, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    caches = [
        KvCache(replace(shape, layers=1), 3, page_tokens, device, dtype) for _ in ("flash", "plain")
    ]
    earlier = [random(page_tokens, shape.heads) for _ in ("keys", "values")]
    for cache in caches:
        cache.write(0, torch.arange(page_tokens, device=device), *earlier)
    # One more token of the sequence whose first page is page 0; the beginning of another.
    row = Span(0, page_tokens, page_tokens + 1, [0, 1])
    queries = page_tokens // 2
    chunk = Span(1, 0, queries, [2])
    q, k, v = (random(1 + queries, count) for count in (heads, shape.heads, shape.heads))
    rule = AttentionRule(shape.head_dim**-0.5, window, None)
    flash = KernelAttention(caches[0], kernel_tables([row, chunk], caches[0], device))
    plain = PagedAttention(caches[1], [row], [chunk], device)
    ours, theirs = (each.attend(0, q, k, v, rule).double() for each in (flash, plain))
    return float((ours - theirs).abs().max() / theirs.abs().max())
