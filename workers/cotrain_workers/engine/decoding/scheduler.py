"""Which sequences run in the next step: admission by pages, oldest first; preemption, youngest first.

Plain bookkeeping. The oldest sequence can take pages from every other, and every sequence fits alone,
so each step brings a sequence closer to its end, and none starves.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING

from cotrain_workers.engine.decoding.step import Chunk, Plan, Row

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from cotrain_workers.engine.decoding.pages import Node, Pages, PrefixIndex
    from cotrain_workers.engine.decoding.sequence import SequenceState

AGE = attrgetter("age")


class DecodeScheduler:
    """Sequences that wait, and sequences that run: those hold pages."""

    def __init__(
        self, pages: Pages, index: PrefixIndex, *, page_tokens: int, step_tokens: int, most: int
    ) -> None:
        assert step_tokens >= page_tokens
        self.waiting: list[SequenceState] = []  # oldest first
        self.running: list[SequenceState] = []  # oldest first
        self._pages = pages
        self._index = index
        self._page_tokens = page_tokens
        self._step_tokens = step_tokens
        self._most = most
        self._stale: dict[int, bool] = {}  # pages taken since the last plan -> needs blanking

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Let sequences wait."""
        for sequence in sequences:
            insort(self.waiting, sequence, key=AGE)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out, waiting or running, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._strip(sequence)
        else:
            self.waiting.remove(sequence)

    def candidates(self) -> list[SequenceState]:
        """Return who may be admitted, oldest first; the first of a request computes its prompt."""
        return [s for s in self.waiting if s.index == 0 or s.group.is_prompt_ready]

    def fits(self, sequence: SequenceState) -> bool:
        """Return whether there are pages for all that a sequence holds so far, and one more."""
        if len(self.running) >= self._most:
            return False
        nodes = self._shareable(sequence)
        idle = sum(not self._pages.is_shared(node.page) for node in nodes)
        wanted = self._page_count(sequence.length) - len(nodes) + 1
        return wanted <= self._pages.free + self._pages.idle - idle

    def admit(self, sequence: SequenceState) -> None:
        """Let a waiting sequence run; it has room."""
        nodes = self._shareable(sequence)
        for node in nodes:
            self._pages.hold(node.page)
        sequence.pages = [node.page for node in nodes]
        for _ in range(self._page_count(sequence.length) - len(nodes)):
            page = self._take()
            assert page is not None
            sequence.pages.append(page)
        for node in nodes:
            self._found(sequence, node)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=AGE)

    def plan(self) -> Plan:
        """Choose the work of one step: a row for everyone who generates, then prompts, oldest first."""
        plan, budget = Plan(), self._step_tokens
        for sequence in list(self.running):
            # Those that a step already has a hidden state for wait for their first token only.
            if sequence.is_prompt_stored and sequence.hidden is None:
                budget -= self._plan_rows(plan, sequence, budget)
        planned: dict[tuple[object, bytes], object] = {}
        for sequence in self.running:
            if not sequence.is_prompt_stored:
                budget -= self._plan_chunks(plan, sequence, budget, planned)
        plan.blank = [page for page, is_stale in self._stale.items() if is_stale]
        self._stale.clear()
        return plan

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
        sequence.stored = min(sequence.stored + self._page_tokens, len(group.prompt))
        if sequence.is_prompt_stored:
            group.is_prompt_ready = True
            sequence.hidden = None if sequence.tokens else node.last_hidden

    def _plan_rows(self, plan: Plan, sequence: SequenceState, budget: int) -> int:
        """Plan the tokens that are not in place: the last one, and more only after a preemption."""
        if sequence not in self.running:  # it was preempted for an older one
            return 0
        count = min(sequence.length - sequence.stored, max(budget, 1))
        positions = range(sequence.stored, sequence.stored + count)
        if not self._make_writable(plan, sequence, positions):
            return 0
        plan.rows += [Row(sequence, position) for position in positions]
        return count

    def _make_writable(self, plan: Plan, sequence: SequenceState, positions: range) -> bool:
        """Give a sequence pages of its own for some positions; False if it was preempted itself."""
        for at in range(positions[0] // self._page_tokens, positions[-1] // self._page_tokens + 1):
            is_new = at == len(sequence.pages)
            if not is_new and not self._pages.is_shared(sequence.pages[at]):
                continue
            page = self._take_from_younger(plan, sequence)
            if page is None:
                return False
            if is_new:
                sequence.pages.append(page)
            else:  # the tail of a prompt that others share
                plan.copies[page] = sequence.pages[at]
                self._stale[page] = False
                self._pages.release(sequence.pages[at])
                sequence.pages[at] = page
        return True

    def _take_from_younger(self, plan: Plan, sequence: SequenceState) -> int | None:
        """Take a page, preempting the youngest until there is one; None if that is `sequence`."""
        while (page := self._take()) is None:
            youngest = self.running.pop()
            self._strip(youngest)
            self.add([youngest])
            plan.preempted.append(youngest)
            if youngest is sequence:
                return None
        return page

    def _plan_chunks(
        self,
        plan: Plan,
        sequence: SequenceState,
        budget: int,
        planned: dict[tuple[object, bytes], object],
    ) -> int:
        """Plan pages of a prompt, in order, as far as the budget goes; return the tokens planned.

        A page that this step computes for another sequence is left for the next step, to be shared.
        """
        group = sequence.group
        self._adopt(sequence)
        parent: object = sequence.node or group.origin
        start = sequence.stored
        while start < len(group.prompt):
            stop = min(start + self._page_tokens, len(group.prompt))
            if stop - start > budget:
                break
            chunk = Chunk(sequence, start, stop)
            key = (parent, group.chunks[chunk.page])
            if key in planned and sequence.is_indexed and not self._must_compute(chunk):
                break
            parent = planned.setdefault(key, object())
            plan.chunks.append(chunk)
            budget -= stop - start
            start = stop
        return start - sequence.stored

    def _adopt(self, sequence: SequenceState) -> None:
        """Take over pages that others have computed since this sequence was admitted."""
        group = sequence.group
        while sequence.is_indexed and not sequence.is_prompt_stored:
            at = sequence.stored // self._page_tokens
            chunk = Chunk(sequence, sequence.stored, sequence.stored + 1)
            node = self._index.find(group.origin, sequence.node, group.chunks[at])
            is_last = at == len(group.chunks) - 1
            if (
                node is None
                or self._must_compute(chunk)
                or (is_last and lacks_hidden(sequence, node))
            ):
                return
            self._swap(sequence, at, node)
            self._found(sequence, node)

    def _must_compute(self, chunk: Chunk) -> bool:
        """Return whether the hidden states of a chunk are asked for."""
        sequence = chunk.sequence
        return sequence.scores_prompt and chunk.page >= sequence.group.first_scored_chunk()

    def _swap(self, sequence: SequenceState, at: int, node: Node) -> None:
        self._pages.hold(node.page)
        self._pages.release(sequence.pages[at])
        sequence.pages[at] = node.page

    def _take(self) -> int | None:
        page = self._pages.take()
        if page is None and self._index.evict():
            page = self._pages.take()
        if page is not None:
            self._stale[page] = True
        return page

    def _strip(self, sequence: SequenceState) -> None:
        """Free the memory of a sequence; what it generated stays."""
        for page in sequence.pages:
            self._pages.release(page)
        sequence.pages = []
        sequence.stored = 0
        sequence.node = None
        sequence.is_indexed = True
        sequence.hidden = None

    def _page_count(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)


def lacks_hidden(sequence: SequenceState, node: Node) -> bool:
    """Return whether a sequence could not go on from a page that ends its prompt.

    The page is then known as the middle of a longer prompt only, without its last hidden state.
    """
    return not sequence.tokens and node.last_hidden is None
