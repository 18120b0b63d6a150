"""Attention of one decoder step over pages.

A prompt attends page by page, each page in one call against exactly its own keys. A generated token
attends alone, to its own length rounded up to whole pages. Both depend only on the sequence, so on a CPU
the bits do not depend on neighbours, cached pages or preemption.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn import functional

from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.device import unordered_writes
from cotrain_workers.engine.model.attention import adjusted_attention
from cotrain_workers.engine.routing import AttentionRule


class Span(NamedTuple):
    """Rows of a step that attend together, at positions `start` to `stop` of one sequence."""

    row: int  # first row in the packed step
    start: int
    stop: int
    pages: Sequence[int]  # page table of the sequence, at least up to `stop`


@dataclass
class Alike:
    """Spans of one shape: `m` times `n` queries against `keys` positions in whole pages."""

    rows: torch.Tensor  # int64 [m * n]
    table: torch.Tensor  # int64 [m, pages]
    starts: torch.Tensor  # int64 [m]: position of the first query
    queries: int  # n
    keys: int
    is_first: bool  # all spans start at position 0, so there are no earlier keys
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(init=False, default_factory=dict)

    def mask(self, window: int | None, heads: int) -> torch.Tensor:
        """Return the mask, bool `[m, 1, heads * n, keys]`: True where a query may attend; equal for all heads."""
        name = (window, heads)
        if name not in self._masks:
            device = self.rows.device
            at = self.starts[:, None] + torch.arange(self.queries, device=device)
            back = at[:, None, :, None] - torch.arange(self.keys, device=device)
            seen = (back >= 0) & (back < (window or self.keys + 1))
            self._masks[name] = seen.repeat(1, 1, heads, 1)
        return self._masks[name]


class PagedAttention:
    """Page tables and attention of one step. Keys and values of the step are written before attending."""

    def __init__(
        self, cache: KvCache, rows: Sequence[Span], chunks: Sequence[Span], device: torch.device
    ) -> None:
        self._cache = cache
        size = cache.page_tokens
        every = (*rows, *chunks)
        kv_slots = [
            span.pages[at // size] * size + at % size for span in every for at in positions(span)
        ]
        at_rows = [span.row + at - span.start for span in every for at in positions(span)]
        self._kv_slots = torch.tensor(kv_slots, device=device)
        self._rows = torch.tensor(at_rows, device=device)
        self._groups = [
            alike(group, cache, device)
            for spans in (rows, chunks)
            for group in by_shape(spans, size)
        ]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape; rows without a sequence become zero."""
        self._cache.write(
            layer, self._kv_slots, k.index_select(0, self._rows), v.index_select(0, self._rows)
        )
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            found = self._attend(layer, group, q, k, v, rule)
            with unordered_writes():
                out.index_copy_(0, group.rows, found.transpose(1, 2).flatten(0, 1))
        return out

    def _attend(
        self,
        layer: int,
        group: Alike,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        queries = batched(q, group)
        if group.is_first and rule.is_plain and rule.window is None:
            return functional.scaled_dot_product_attention(
                queries,
                batched(k, group),
                batched(v, group),
                is_causal=True,
                scale=rule.scaling,
                enable_gqa=True,
            )
        keys, values = self._cache.gather(layer, group.table)
        if not rule.is_plain:
            return adjusted(queries, keys, values, group.mask(rule.window, 1), rule)
        return grouped_attention(queries, keys, values, group, rule)


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Alike, rule: AttentionRule
) -> torch.Tensor:
    """Attend with the query heads that share keys as further queries of one head.

    With `enable_gqa` and few queries, two threads split the work by the batch size, so a row's bits depend
    on its neighbours. The same happens when the number of keys is odd (measured on CPU fp32).
    """
    m, heads, n, d = q.shape
    shared = heads // k.shape[1]
    out = functional.scaled_dot_product_attention(
        q.reshape(m, k.shape[1], shared * n, d),
        k,
        v,
        attn_mask=group.mask(rule.window, shared),
        scale=rule.scaling,
    )
    return out.reshape(m, heads, n, d)


def adjusted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attend with a cap or sinks; a single item is computed twice, because a batch of one has other bits."""
    if len(q) > 1:
        return adjusted_attention(q, k, v, mask, rule)
    q, k, v, mask = (x.expand(2, -1, -1, -1) for x in (q, k, v, mask))
    return adjusted_attention(q, k, v, mask, rule)[:1]


def positions(span: Span) -> range:
    """Return the positions of a span."""
    return range(span.start, span.stop)


def batched(x: torch.Tensor, group: Alike) -> torch.Tensor:
    """Return a group's rows of `x` `[T, heads, d]` as `[m, heads, n, d]`."""
    picked = x.index_select(0, group.rows)
    return picked.view(-1, group.queries, *x.shape[1:]).transpose(1, 2)


def by_shape(spans: Iterable[Span], page_tokens: int) -> list[list[Span]]:
    """Group spans that have the same number of queries and of pages."""
    groups: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        shape = (span.stop - span.start, -(-span.stop // page_tokens))
        groups.setdefault(shape, []).append(span)
    return list(groups.values())


def alike(spans: Sequence[Span], cache: KvCache, device: torch.device) -> Alike:
    """Return the tables of spans of one shape."""
    first, size = spans[0], cache.page_tokens
    pages = -(-first.stop // size)
    rows = [span.row + at for span in spans for at in range(span.stop - span.start)]
    return Alike(
        rows=torch.tensor(rows, device=device),
        table=torch.tensor([list(span.pages[:pages]) for span in spans], device=device),
        starts=torch.tensor([span.start for span in spans], device=device),
        queries=first.stop - first.start,
        keys=pages * size,
        is_first=all(span.start == 0 for span in spans),
    )
