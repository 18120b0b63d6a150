"""Attention of one decoder step over pages.

A prompt attends page by page, each page in one call against exactly its own keys; a generated token
attends alone, to its own length rounded up to whole pages. Both depend on the sequence only, so on CPU
neighbours, cached pages and preemption change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from cotrain_workers.attn import softcapped_attention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cotrain_workers.attn import Rule
    from cotrain_workers.kv_cache import KvCache


class Span(NamedTuple):
    """Rows of a step that attend together: positions `start` to `stop` of one sequence."""

    row: int  # where they begin in the packed row
    start: int
    stop: int
    pages: Sequence[int]  # the sequence's page table, up to `stop` at least


@dataclass
class Alike:
    """Spans of one shape: `m` times `n` queries against `keys` positions."""

    rows: torch.Tensor  # int64 [m * n]
    table: torch.Tensor  # int64 [m, pages]
    starts: torch.Tensor  # int64 [m]: position of the first query
    queries: int  # n
    keys: int
    is_first: bool  # the queries are all there is to attend to: no page need be read
    _masks: dict[int | None, torch.Tensor] = field(init=False, default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """Return bool `[m, 1, n, keys]`, true where a query may look."""
        if window not in self._masks:
            device = self.rows.device
            at = self.starts[:, None] + torch.arange(self.queries, device=device)
            back = at[:, None, :, None] - torch.arange(self.keys, device=device)
            self._masks[window] = (back >= 0) & (back < (window or self.keys + 1))
        return self._masks[window]


class PagedAttention:
    """The page tables of one step, and its attention; writes the step's keys and values first."""

    def __init__(
        self, cache: KvCache, rows: Sequence[Span], chunks: Sequence[Span], device: torch.device
    ) -> None:
        self._cache = cache
        size = cache.page_tokens
        spans = (*rows, *chunks)
        places = [
            span.pages[at // size] * size + at % size for span in spans for at in positions(span)
        ]
        at_rows = [span.row + at - span.start for span in spans for at in positions(span)]
        self._places = torch.tensor(places, device=device)
        self._rows = torch.tensor(at_rows, device=device)
        self._groups = [
            *(alike(group, cache, device) for group in by_shape(rows, size)),
            *(alike(group, cache, device, exact=True) for group in by_shape(chunks, 1)),
        ]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape; rows that belong to nobody become zero."""
        self._cache.write(
            layer, self._places, k.index_select(0, self._rows), v.index_select(0, self._rows)
        )
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            found = self._attend(layer, group, q, k, v, rule)
            out.index_copy_(0, group.rows, found.transpose(1, 2).flatten(0, 1))
        return out

    def _attend(
        self,
        layer: int,
        group: Alike,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: Rule,
    ) -> torch.Tensor:
        queries = batched(q, group)
        if group.is_first:
            keys, values = batched(k, group), batched(v, group)
        else:
            keys, values = (x[:, :, : group.keys] for x in self._cache.gather(layer, group.table))
        if rule.softcap is not None:
            return softcapped_attention(queries, keys, values, group.mask(rule.window), rule)
        is_causal = group.is_first and (rule.window is None or group.keys <= rule.window)
        return functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if is_causal else group.mask(rule.window),
            is_causal=is_causal,
            scale=rule.scaling,
            enable_gqa=True,
        )


def positions(span: Span) -> range:
    """Return the positions of a span."""
    return range(span.start, span.stop)


def batched(x: torch.Tensor, group: Alike) -> torch.Tensor:
    """Pick a group's rows of `x` `[T, heads, d]`: `[m, heads, n, d]`."""
    picked = x.index_select(0, group.rows)
    return picked.view(-1, group.queries, *x.shape[1:]).transpose(1, 2)


def by_shape(spans: Iterable[Span], step: int) -> list[list[Span]]:
    """Put together spans of as many queries that attend to as many keys, rounded up to `step`."""
    groups: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        shape = (span.stop - span.start, -(-span.stop // step))
        groups.setdefault(shape, []).append(span)
    return list(groups.values())


def alike(
    spans: Sequence[Span], cache: KvCache, device: torch.device, *, exact: bool = False
) -> Alike:
    """Build the tables of spans of one shape."""
    first, size = spans[0], cache.page_tokens
    pages = -(-first.stop // size)
    rows = [span.row + at for span in spans for at in range(span.stop - span.start)]
    return Alike(
        rows=torch.tensor(rows, device=device),
        table=torch.tensor([list(span.pages[:pages]) for span in spans], device=device),
        starts=torch.tensor([span.start for span in spans], device=device),
        queries=first.stop - first.start,
        keys=first.stop if exact else pages * size,
        is_first=exact and first.start == 0,
    )
