"""States of layers in one decoder step, kept beside the pages.

Each page has the states after the last token that is stored on it. A shared page of a prompt has the state from which
a sequence continues, a copied page gets a copy, and a preempted sequence finds those of its prompt. So states
follow the pages in everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.paged_attention import Span
from cotrain_workers.engine.device import to_device, unordered_writes
from cotrain_workers.engine.model.linear_attention import (
    Blocks,
    Run,
    blocks_of,
    by_blocks,
    by_token,
    move_of,
    moved,
)


class StepStates:
    """The `Rows` of a step: prompts by blocks, generated tokens one by one."""

    def __init__(
        self, cache: KvCache, rows: Sequence[Span], chunks: Sequence[Span], total: int
    ) -> None:
        self._cache = cache
        device = cache.device
        prompts, tokens = adjacent(chunks), adjacent(rows)
        runs = [*prompts, *tokens]
        size = cache.page_tokens
        kept = cache.states[0][0].shape[1]  # inputs of the convolution before the token

        def at(indices: Sequence[int] | np.ndarray) -> torch.Tensor:
            return to_device(np.array(indices, np.int64), device)

        # The last page of the cache has states of zero.
        read = [
            run[0].pages[(run[0].start - 1) // size] if run[0].start else cache.dump for run in runs
        ]
        ends = [span for run in prompts for span in run] + [run[-1] for run in tokens]
        self._read = at(read)
        self._written = at([span.pages[(span.stop - 1) // size] for span in ends])
        source = np.full((total, kept + 1), -1)  # of the inputs 0, 1 … tokens before each row
        for number, run in enumerate(runs):
            first, stop = run[0].row, run[-1].row + run[-1].stop - run[-1].start
            # The inputs before a run follow the rows of the step, oldest first.
            earlier = total + number * kept + np.arange(kept)
            line = np.concatenate([earlier, np.arange(first, stop)])
            for back in range(kept + 1):
                source[first:stop, back] = line[kept - back : len(line) - back]
        self._taps = [move_of(source[:, back], device) for back in range(1, kept + 1)]
        last = [span.row + span.stop - span.start - 1 for span in ends]
        self._kept = at(source[last, :kept][:, ::-1].ravel())
        self._blocks: Blocks | None = None
        if prompts:
            pieces = [Run(run[0].row, [span.stop - span.start for span in run]) for run in prompts]
            self._blocks = blocks_of(pieces, total, device)
            self._first = at([read[run] for run in self._blocks.order])
            self._ends = at(self._blocks.ends)
        # Sequences with most tokens first, so that those with another token are the first ones.
        order = sorted(range(len(tokens)), key=lambda run: -len(tokens[run]))
        self._depths = [
            at([tokens[run][depth].row for run in order if len(tokens[run]) > depth])
            for depth in range(max(map(len, tokens), default=0))
        ]
        self._of_tokens = at([read[len(prompts) + run] for run in order])
        self._to_tokens = at(
            [tokens[run][-1].pages[(tokens[run][-1].stop - 1) // size] for run in order]
        )
        pages_of_prompts = sum(map(len, prompts))
        self._to_prompts = self._written[:pages_of_prompts]

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
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the outputs `[T, heads, d_v]`, and keep the states after each page; see `by_blocks`."""
        memory = self._cache.states[layer][1]
        out = torch.zeros(v.shape, dtype=memory.dtype, device=v.device)
        if self._blocks is not None:
            first = memory.index_select(0, self._first)
            out, states = by_blocks(q, k, v, g, beta, self._blocks, first)
            with unordered_writes():
                memory.index_copy_(0, self._to_prompts, states.index_select(0, self._ends))
        if not self._depths:
            return out
        state = memory.index_select(0, self._of_tokens)
        ended = []
        for rows in self._depths:
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


def adjacent(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of each sequence, which follow one another."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and runs[-1][-1].pages is span.pages:
            assert runs[-1][-1].stop == span.start
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs
