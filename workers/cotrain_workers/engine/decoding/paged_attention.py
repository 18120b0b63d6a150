"""Attention of one decoder step over pages, and the states that layers of hybrids keep with them.

A prompt attends page by page, each page in one call against exactly its own keys. A generated token
attends alone, to its own length rounded up to whole pages. Both depend only on the sequence, so on a CPU
the bits do not depend on neighbours, cached pages or preemption.

Each page has the states after the last token that is stored on it. A shared page of a prompt has the state from which
a sequence continues, and a copied page gets a copy. So states follow the pages in everything.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.model.attention import adjusted_attention
from cotrain_workers.engine.model.delta_rule import Blocks, Run, blocks_of, by_blocks, by_token, move_of, moved
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

    def __init__(self, cache: KvCache, rows: Sequence[Span], chunks: Sequence[Span], device: torch.device) -> None:
        self._cache = cache
        size = cache.page_tokens
        every = (*rows, *chunks)
        at_rows = [span.row + at - span.start for span in every for at in positions(span)]
        self._kv_slots = torch.tensor(kv_slots(every, size), device=device)
        self._rows = torch.tensor(at_rows, device=device)
        self._groups = [alike(group, cache, device) for spans in (rows, chunks) for group in by_shape(spans, size)]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Map `q` `[T, heads, d]` to the same shape; rows without a sequence become zero."""
        self._cache.write(layer, self._kv_slots, k.index_select(0, self._rows), v.index_select(0, self._rows))
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            found = self._attend(layer, group, q, k, v, rule)
            with unordered_writes():
                out.index_copy_(0, group.rows, found.transpose(1, 2).flatten(0, 1))
        return out

    def _attend(
        self, layer: int, group: Alike, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        queries = batched(q, group)
        if group.is_first and rule.is_plain and rule.window is None:
            return functional.scaled_dot_product_attention(
                queries, batched(k, group), batched(v, group), is_causal=True, scale=rule.scaling, enable_gqa=True
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
        q.reshape(m, k.shape[1], shared * n, d), k, v, attn_mask=group.mask(rule.window, shared), scale=rule.scaling
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


def kv_slots(spans: Sequence[Span], page_tokens: int) -> list[int]:
    """Return the position in the KV cache of each row of some spans."""
    size = page_tokens
    return [span.pages[at // size] * size + at % size for span in spans for at in positions(span)]


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


class StepStates:
    """The `StatefulRows` of a step: prompts by blocks, generated tokens one by one.

    A run is the spans of one sequence in this step. It starts from the state on the page of the token before it, and
    leaves a state on the page of its last token. A run of a prompt leaves one on each of its pages.
    """

    def __init__(self, cache: KvCache, rows: Sequence[Span], chunks: Sequence[Span], total: int) -> None:
        self._cache = cache
        size, device = cache.page_tokens, cache.device
        prompts, tokens = runs_of(chunks), runs_of(rows)
        # Sequences with most tokens first: those with an n-th token are then the first ones.
        tokens.sort(key=len, reverse=True)
        runs = [*prompts, *tokens]
        ends = [*itertools.chain(*prompts), *(run[-1] for run in tokens)]
        read = [page_before(run[0], cache) for run in runs]
        written = [page_of(span, span.stop - 1, size) for span in ends]
        kept = cache.states[0][0].shape[1]  # inputs of the convolution before a token
        sources = input_sources(runs, kept, total)
        last = [span.row + len(positions(span)) - 1 for span in ends]

        self._read = indices(read, device)
        self._written = indices(written, device)
        self._taps = [move_of(sources[:, back], device) for back in range(1, kept + 1)]
        self._kept = indices(sources[last, :kept][:, ::-1].ravel(), device)

        self._blocks: Blocks | None = None
        if prompts:
            lengths = [Run(run[0].row, [len(positions(span)) for span in run]) for run in prompts]
            self._blocks = blocks_of(lengths, total, device)
            (grid,) = self._blocks.grids
            self._first = indices([read[run] for run in grid.order], device)
            self._ends = indices(grid.ends, device)
        self._to_prompts, self._to_tokens = self._written.tensor_split([len(ends) - len(tokens)])
        self._of_tokens = self._read[len(prompts) :]
        self._nth_tokens = [
            indices([run[nth].row for run in tokens if len(run) > nth], device)
            for nth in range(max(map(len, tokens), default=0))
        ]

    def before(self, layer: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the rows one, two … tokens before each row of `x` `[T, channels]`, and keep the last ones."""
        memory = self._cache.states[layer][0]
        earlier = memory.index_select(0, self._read).flatten(0, 1)
        source = torch.cat([x, earlier])
        kept = source.index_select(0, self._kept).view(-1, *memory.shape[1:])
        with unordered_writes():
            memory.index_copy_(0, self._written, kept)
        return [moved(source, tap) for tap in self._taps]

    def scan(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the outputs `[T, heads, d_v]`, and keep the states after each page; see `by_blocks`."""
        memory = self._cache.states[layer][1]
        out = torch.zeros(v.shape, dtype=memory.dtype, device=v.device)
        if self._blocks is not None:
            first = memory.index_select(0, self._first)
            out, after = by_blocks(q, k, v, g, beta, self._blocks, first)
            with unordered_writes():
                memory.index_copy_(0, self._to_prompts, torch.cat(after).index_select(0, self._ends))
        if not self._nth_tokens:
            return out
        state = memory.index_select(0, self._of_tokens)
        ended = []
        for rows in self._nth_tokens:
            ended.append(state[len(rows) :])
            own_q, own_k, own_v, own_g = (each.index_select(0, rows) for each in (q, k, v, g))
            rates = None if beta is None else beta.index_select(0, rows)
            found, state = by_token(own_q, own_k, own_v, own_g, rates, state[: len(rows)])
            with unordered_writes():
                out.index_copy_(0, rows, found)
        states = torch.cat([state, *reversed(ended)])
        with unordered_writes():
            memory.index_copy_(0, self._to_tokens, states)
        return out


def runs_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of each sequence, which follow one another."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and runs[-1][-1].pages is span.pages:
            assert runs[-1][-1].stop == span.start
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def input_sources(runs: Sequence[Sequence[Span]], kept: int, total: int) -> np.ndarray:
    """Return, per row and n, the place of the input n tokens before the row, int64 `[total, kept + 1]`; -1 for none.

    The places are the `total` rows of the step, and then the `kept` inputs before each run, oldest first.
    """
    sources = np.full((total, kept + 1), -1)
    for number, run in enumerate(runs):
        first, stop = run[0].row, run[-1].row + len(positions(run[-1]))
        earlier = total + number * kept + np.arange(kept)
        line = np.concatenate([earlier, np.arange(first, stop)])
        for back in range(kept + 1):
            sources[first:stop, back] = line[kept - back : len(line) - back]
    return sources


def page_of(span: Span, position: int, page_tokens: int) -> int:
    """Return the page that stores the token at this position of the span's sequence."""
    return span.pages[position // page_tokens]


def page_before(span: Span, cache: KvCache) -> int:
    """Return the page with the state before the span. The cache's last page has states of zero."""
    return page_of(span, span.start - 1, cache.page_tokens) if span.start else cache.dump


def indices(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the values on the device, int64."""
    return to_device(np.array(values, np.int64), device)
