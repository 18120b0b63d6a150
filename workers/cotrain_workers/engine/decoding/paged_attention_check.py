"""Self-check of the kernel over pages: it must match the plain attention before it is used."""

import logging
from dataclasses import replace

import torch

from cotrain_workers.engine.decoding.cuda_kernels import KernelAttention, kernel_tables
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.page_attention.kernel import SPLIT
from cotrain_workers.engine.decoding.paged_attention import PagedAttention, Span
from cotrain_workers.engine.decoding.step import Attention
from cotrain_workers.engine.device import check_device
from cotrain_workers.engine.model.base_model import KvShape
from cotrain_workers.engine.routing import AttentionRule

#: Relative to the largest value of a row; probabilities are rounded to the type of the values.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}

log = logging.getLogger(__name__)


def kernel_is_right(
    shape: KvShape,
    heads: int,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    softcap: float | None,
) -> bool:
    """Return True if the kernel matches the plain attention; a failure or a mismatch is logged.

    `heads` is the number of query heads. Raises DeviceLost.
    """
    try:
        rules = [AttentionRule(shape.head_dim**-0.5, window, softcap) for window in (None, 8)]
        found = max(difference(shape, heads, page_tokens, device, dtype, rule) for rule in rules)
    except Exception:  # compilers raise exceptions of any type
        check_device(device)
        log.exception("Decoding is slow here: the attention kernel over pages is not used")
        return False
    is_close = found < TOLERANCE[dtype]
    if not is_close:
        log.error("Decoding is slow here: the attention kernel over pages is off by %.3g", found)
    return is_close


@torch.no_grad()
def difference(
    shape: KvShape,
    heads: int,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    rule: AttentionRule,
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
        attention: Attention = PagedAttention(cache, rows, chunks, device)
        if not found:
            tables = kernel_tables([*rows, *chunks], cache, heads // shape.heads, device)
            attention = KernelAttention(cache, tables)
        q, k, v = (each.to(kind) for each in given)
        found.append(attention.attend(0, q, k, v, rule).double())
    ours, theirs = found
    return float(((ours - theirs).abs().amax((1, 2)) / theirs.abs().amax((1, 2))).max())
