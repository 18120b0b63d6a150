"""Pages of running sequences: allocation, sharing of prompts, copy on write, release."""

from collections.abc import Callable

import numpy as np
import torch

from cotrain_workers.engine.decoding.scheduling.pages import Node, Pages, PrefixIndex
from cotrain_workers.engine.decoding.sequence import SequenceState
from cotrain_workers.engine.decoding.step import Plan, Work


class SequencePages:
    """Allocation of pages to sequences, and the record of their stored tokens."""

    def __init__(self, pages: Pages, index: PrefixIndex, page_tokens: int) -> None:
        self.counts = pages
        self.page_tokens = page_tokens
        self._index = index
        self._stale: dict[int, bool] = {}  # pages taken since the last plan -> must be zeroed

    def wanted(self, sequence: SequenceState) -> tuple[int, int]:
        """Return the number of pages that a waiting sequence needs, and how many of them are missing.

        It needs pages for its tokens so far, and one more.
        """
        nodes = self._shareable(sequence)
        idle = sum(not self.counts.is_shared(node.page) for node in nodes)
        wanted = self._page_count(sequence.length) - len(nodes) + 1
        return wanted, wanted - (self.counts.free + self.counts.idle - idle)

    def give(self, sequence: SequenceState) -> None:
        """Allocate pages for all tokens of a sequence; the caller has made sure that they are available."""
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
        """Return the pages taken since the last call that still hold data of their last user."""
        blank = [page for page, is_stale in self._stale.items() if is_stale]
        self._stale.clear()
        return blank

    def strip(self, sequence: SequenceState) -> None:
        """Free the memory of a sequence and keep its generated tokens."""
        for page in sequence.pages:
            self.counts.release(page)
        sequence.pages = []
        sequence.stored = 0
        sequence.experts = []
        sequence.node = None
        sequence.is_indexed = True
        sequence.hidden = None
        sequence.unread = 0

    def take(self, sequence: SequenceState) -> int | None:
        """Return a page for a sequence, if necessary one held only by the index; None if there is none."""
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
        """Allocate private pages for some positions of a sequence; return False if `take` returns none."""
        for at in range(positions[0] // self.page_tokens, positions[-1] // self.page_tokens + 1):
            is_new = at == len(sequence.pages)
            if not is_new and not self.counts.is_shared(sequence.pages[at]):
                continue
            page = take()
            if page is None:
                return False
            if is_new:
                sequence.pages.append(page)
            else:  # the shared last page of a prompt is copied before the first write
                plan.copies[page] = sequence.pages[at]
                self._stale[page] = False
                self.counts.release(sequence.pages[at])
                sequence.pages[at] = page
        return True

    def adopt(self, sequence: SequenceState) -> None:
        """Use pages that other sequences have computed since this one was admitted."""
        group = sequence.group
        while sequence.is_indexed and not sequence.is_prompt_stored:
            at = sequence.stored // self.page_tokens
            chunk = Work(sequence, sequence.stored, sequence.stored + 1)
            node = self._index.find(group.origin, sequence.node, group.chunks[at])
            is_last = at == len(group.chunks) - 1
            if node is None or self.must_compute(chunk) or (is_last and lacks_hidden(sequence, node)):
                return
            self._swap(sequence, at, node)
            self._found(sequence, node)

    def must_compute(self, chunk: Work) -> bool:
        """Return True if the hidden states of a chunk are needed for prompt scores."""
        sequence = chunk.sequence
        return sequence.scores_prompt and chunk.page >= sequence.group.first_scored_chunk()

    def store(self, chunk: Work, last_hidden: torch.Tensor | None, experts: np.ndarray | None = None) -> None:
        """Record that a chunk is stored, and index it.

        `last_hidden` belongs to its last token, `experts` `[n, layers, k]` to all of them.
        """
        sequence, group = chunk.sequence, chunk.sequence.group
        sequence.stored = chunk.stop
        sequence.note_experts(experts)
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
        if node.page != own:  # another sequence has computed the same bits
            self._swap(sequence, chunk.page, node)
        sequence.node = node
        node.experts = experts
        if chunk.ends_prompt:
            node.last_hidden = last_hidden

    def _shareable(self, sequence: SequenceState) -> list[Node]:
        """Return the stored prompt pages that a sequence can share instead of computing them."""
        group = sequence.group
        chunks = group.chunks
        if sequence.scores_prompt:
            chunks = chunks[: group.first_scored_chunk()]
        nodes = self._index.match(group.origin, chunks)
        if len(nodes) == len(group.chunks) and lacks_hidden(sequence, nodes[-1]):
            nodes.pop()
        return nodes

    def _found(self, sequence: SequenceState, node: Node) -> None:
        """Record that the next page of a prompt is stored, on a page that the sequence already holds."""
        group = sequence.group
        sequence.node = node
        sequence.note_experts(node.experts)
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
    """Return True if a sequence lacks the hidden state to continue after the page that ends its prompt.

    The page was then indexed only as the middle of a longer prompt.
    """
    return not sequence.tokens and node.last_hidden is None
