"""Self-check of the flash kernel over pages: it must match the plain attention before it is used."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from cotrain_workers.engine.decoding.cuda_kernels import (
    CONTRACTS,
    Contract,
    KernelAttention,
    kernel_tables,
)
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.paged_attention import PagedAttention, Span
from cotrain_workers.engine.model.attention import varlen_parameters
from cotrain_workers.engine.model.base_model import KvShape
from cotrain_workers.engine.routing import AttentionRule

#: Relative to the largest value; probabilities are rounded to 16 bits.
TOLERANCE = 2e-2

log = logging.getLogger(__name__)


def find_contract(
    shape: KvShape, heads: int, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> Contract | None:
    """Return the arguments with which the kernel matches the plain attention, or None.

    The check uses two sequences, one of two pages. A mismatch is logged with its reasons. `heads` is the number
    of query heads.
    """
    reasons = []
    for contract in CONTRACTS:
        if contract.one_split and "num_splits" not in varlen_parameters():
            continue
        try:
            check = partial(difference, shape, heads, page_tokens, device, dtype, contract=contract)
            found = max(check(window=window, queries=n) for window in (None, 8) for n in (1, 3))
        except (
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # its signature depends on the torch version
            reasons.append(f"{contract} cannot run: {str(error).splitlines()[0]}")
            continue
        if found < TOLERANCE:
            return contract
        reasons.append(f"{contract} is off by {found:.3g}")
    log.error("Decoding is slow here: the flash kernel over pages: %s", "; ".join(reasons))
    return None


@torch.no_grad()
def difference(
    shape: KvShape,
    heads: int,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    contract: Contract,
    window: int | None,
    queries: int,
) -> float:
    """Return the maximum difference relative to the largest value; the second sequence has `queries`."""
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, count: int) -> torch.Tensor:
        size = (rows, count, shape.head_dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    caches = [
        KvCache(replace(shape, layers=1), 3, page_tokens, device, dtype) for _ in ("flash", "plain")
    ]
    earlier = [random(page_tokens, shape.heads) for _ in ("keys", "values")]
    for cache in caches:
        cache.prepare({}, range(3))
        cache.write(0, torch.arange(page_tokens, device=device), *earlier)
    # One more token of the sequence whose first page is page 0, and the start of another sequence.
    row = Span(0, page_tokens, page_tokens + 1, [0, 1])
    chunk = Span(1, 0, queries, [2])
    q, k, v = (random(1 + queries, count) for count in (heads, shape.heads, shape.heads))
    rule = AttentionRule(shape.head_dim**-0.5, window, None)
    flash = KernelAttention(caches[0], kernel_tables([row, chunk], caches[0], device), contract)
    plain = PagedAttention(caches[1], [row], [chunk], device)
    ours, theirs = (each.attend(0, q, k, v, rule).double() for each in (flash, plain))
    return float((ours - theirs).abs().max() / theirs.abs().max())
