"""The pages of the sequences that run: taken, shared with others of the same prompt, copied, freed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cotrain_workers.engine.decoding.scheduling.pages import Node, Pages, PrefixIndex
from cotrain_workers.engine.decoding.sequence import SequenceState
from cotrain_workers.engine.decoding.step import Chunk, Plan


class SequencePages:
    """Gives sequences their pages, and keeps track of what is in place on them."""

    def __init__(self, pages: Pages, index: PrefixIndex, page_tokens: int) -> None:
        self.counts = pages
        self.page_tokens = page_tokens
        self._index = index
        self._stale: dict[int, bool] = {}  # pages taken since the last plan -> needs blanking

    def wanted(self, sequence: SequenceState) -> tuple[int, int]:
        """Return how many pages a waiting sequence needs for all it holds so far and one token more.

        And how many of them are missing.
        """
        nodes = self._shareable(sequence)
        idle = sum(not self.counts.is_shared(node.page) for node in nodes)
        wanted = self._page_count(sequence.length) - len(nodes) + 1
        return wanted, wanted - (self.counts.free + self.counts.idle - idle)

    def give(self, sequence: SequenceState) -> None:
        """Give a sequence pages for all it holds so far; they are there."""
        nodes = self._shareable(sequence)
        for node in nodes:
            self.counts.hold(node.page)
        sequence.pages = [node.page for node in nodes]
        for _ in range(self._page_count(sequence.length) - len(nodes)):
            page = self.take(sequence)
            assert page is not None
            sequence.pages.append(page)
        for node in nodes:
            self._found(sequence, node)

    def blank(self) -> list[int]:
        """Return the pages taken since the last call that hold what their last user left."""
        blank = [page for page, is_stale in self._stale.items() if is_stale]
        self._stale.clear()
        return blank

    def strip(self, sequence: SequenceState) -> None:
        """Free the memory of a sequence; what it generated stays."""
        for page in sequence.pages:
            self.counts.release(page)
        sequence.pages = []
        sequence.stored = 0
        sequence.node = None
        sequence.is_indexed = True
        sequence.hidden = None
        sequence.unread = 0

    def take(self, sequence: SequenceState) -> int | None:
        """Return a page for a sequence, of those that only the index holds if no other is free, or None."""
        tenant = sequence.group.request.tenant
        page = self.counts.take(tenant)
        if page is None and self._index.evict():
            page = self.counts.take(tenant)
        if page is not None:
            self._stale[page] = True
        return page

    def make_writable(
        self, plan: Plan, sequence: SequenceState, positions: range, take: Callable[[], int | None]
    ) -> bool:
        """Give a sequence pages of its own for some positions; False once `take` has none."""
        for at in range(positions[0] // self.page_tokens, positions[-1] // self.page_tokens + 1):
            is_new = at == len(sequence.pages)
            if not is_new and not self.counts.is_shared(sequence.pages[at]):
                continue
            page = take()
            if page is None:
                return False
            if is_new:
                sequence.pages.append(page)
            else:  # the tail of a prompt that others share
                plan.copies[page] = sequence.pages[at]
                self._stale[page] = False
                self.counts.release(sequence.pages[at])
                sequence.pages[at] = page
        return True

    def adopt(self, sequence: SequenceState) -> None:
        """Take over pages that others have computed since this sequence was admitted."""
        group = sequence.group
        while sequence.is_indexed and not sequence.is_prompt_stored:
            at = sequence.stored // self.page_tokens
            chunk = Chunk(sequence, sequence.stored, sequence.stored + 1)
            node = self._index.find(group.origin, sequence.node, group.chunks[at])
            is_last = at == len(group.chunks) - 1
            if (
                node is None
                or self.must_compute(chunk)
                or (is_last and lacks_hidden(sequence, node))
            ):
                return
            self._swap(sequence, at, node)
            self._found(sequence, node)

    def must_compute(self, chunk: Chunk) -> bool:
        """Return whether the hidden states of a chunk are asked for."""
        sequence = chunk.sequence
        return sequence.scores_prompt and chunk.page >= sequence.group.first_scored_chunk()

    def store(self, chunk: Chunk, last_hidden: torch.Tensor | None) -> None:
        """Note that a chunk is in place, and let others share it. `last_hidden` is of its last token."""
        sequence, group = chunk.sequence, chunk.sequence.group
        sequence.stored = chunk.stop
        group.computed.add(chunk.page)
        if chunk.ends_prompt:
            group.is_prompt_ready = True
            sequence.hidden = None if sequence.tokens else last_hidden
        if not sequence.is_indexed:
            return
        own = sequence.pages[chunk.page]
        node = self._index.insert(group.origin, sequence.node, group.chunks[chunk.page], own)
        if node is None:
            sequence.is_indexed = False
            return
        if node.page != own:  # the same bits, computed by another
            self._swap(sequence, chunk.page, node)
        sequence.node = node
        if chunk.ends_prompt:
            node.last_hidden = last_hidden

    def _shareable(self, sequence: SequenceState) -> list[Node]:
        """Return the pages of its prompt that are in place and that it need not compute itself."""
        group = sequence.group
        chunks = group.chunks
        if sequence.scores_prompt:
            chunks = chunks[: group.first_scored_chunk()]
        nodes = self._index.match(group.origin, chunks)
        if len(nodes) == len(group.chunks) and lacks_hidden(sequence, nodes[-1]):
            nodes.pop()
        return nodes

    def _found(self, sequence: SequenceState, node: Node) -> None:
        """Note that the next page of a prompt is in place; the sequence holds it already."""
        group = sequence.group
        sequence.node = node
        sequence.stored = min(sequence.stored + self.page_tokens, len(group.prompt))
        if sequence.is_prompt_stored:
            group.is_prompt_ready = True
            sequence.hidden = None if sequence.tokens else node.last_hidden

    def _swap(self, sequence: SequenceState, at: int, node: Node) -> None:
        self.counts.hold(node.page)
        self.counts.release(sequence.pages[at])
        sequence.pages[at] = node.page

    def _page_count(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


def lacks_hidden(sequence: SequenceState, node: Node) -> bool:
    """Return whether a sequence could not go on from a page that ends its prompt.

    The page is then known as the middle of a longer prompt only, without its last hidden state.
    """
    return not sequence.tokens and node.last_hidden is None
