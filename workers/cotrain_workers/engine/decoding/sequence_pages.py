"""Pages of running sequences: work of a step on them, allocation, sharing of prompts, copy on write, preemption.

Preemption takes the youngest sequences of the tenant with the most memory. A waiting sequence may preempt only a
tenant that afterwards has at least as much as the waiting tenant. Two tenants therefore never preempt each other in
turn. A tenant without running sequences may also preempt a sequence whose lease has expired: it has generated at least
`LEASE_TOKENS` since its last admission.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from cotrain_workers.engine.decoding.kv_cache import Node, Pages, PrefixIndex
from cotrain_workers.engine.decoding.sequence import SequenceState, TenantQueue

#: Tokens that an admitted sequence may generate before a tenant without running sequences can preempt it. A
#: long one may generate 1 / LEASE_SHARE of its length, because all its tokens are recomputed.
LEASE_TOKENS, LEASE_SHARE = 256, 8


class Work(NamedTuple):
    """Positions of a sequence that one step computes: of its prompt, on one page, or of one generated token."""

    sequence: SequenceState
    start: int
    stop: int

    @property
    def is_prompt(self) -> bool:
        """True for tokens of the prompt."""
        return self.start < len(self.sequence.group.prompt)

    @property
    def page(self) -> int:
        """Index in the sequence's page table."""
        return self.start // self.sequence.group.page_tokens

    @property
    def ends_prompt(self) -> bool:
        """True if it completes the prompt."""
        return self.stop == len(self.sequence.group.prompt)

    @property
    def ends_sequence(self) -> bool:
        """True if the next token is chosen after it; earlier work recomputes a preempted sequence."""
        return self.stop == self.sequence.length


@dataclass
class Plan:
    """One step; pages are copied first, then zeroed, then the work is computed."""

    work: list[Work] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)  # page to write -> page to read
    blank: list[int] = field(default_factory=list)  # pages with data of their last user, to zero
    preempted: list[SequenceState] = field(default_factory=list)


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
            if node is None or self.must_compute(chunk) or (is_last and _lacks_hidden(sequence, node)):
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
        if len(nodes) == len(group.chunks) and _lacks_hidden(sequence, nodes[-1]):
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


def _lacks_hidden(sequence: SequenceState, node: Node) -> bool:
    """Return True if a sequence lacks the hidden state to continue after the page that ends its prompt.

    The page was then indexed only as the middle of a longer prompt.
    """
    return not sequence.tokens and node.last_hidden is None


def largest_holder(queues: Mapping[str, TenantQueue], pages: Pages, asks: str) -> SequenceState:
    """Return the sequence to preempt when a running sequence of tenant `asks` needs another page.

    It may be the sequence itself; the others, none of which holds more, then continue.
    """
    running = [tenant for tenant, queue in queues.items() if queue.running]
    tenant = max(running, key=lambda each: pages.used[each] + (each == asks))
    return queues[tenant].running[-1]


def victims_for_pages(
    queues: Mapping[str, TenantQueue], pages: Pages, asks: str, wanted: int, missing: int
) -> list[SequenceState] | None:
    """Return the sequences to preempt so that a waiting one gets `wanted` pages, of which `missing` are not free.

    None if preemption cannot free enough pages.
    """
    used = {tenant: pages.used[tenant] for tenant in queues if tenant != asks}
    left = {tenant: list(queues[tenant].running) for tenant in used}
    victims: list[SequenceState] = []
    while missing > 0:
        tenant = max((each for each in used if left[each]), key=used.__getitem__, default=None)
        if tenant is None:
            return None
        victim = left[tenant].pop()
        freed = sum(map(pages.is_available_without, victim.pages))
        keeps_enough = used[tenant] - freed >= pages.used[asks] + wanted
        if keeps_enough or (not queues[asks].running and _had_lease(victim)):
            victims.append(victim)
            used[tenant] -= freed
            missing -= freed
    return victims


def victims_for_weights(
    queues: Mapping[str, TenantQueue],
    asks: str,
    candidates: frozenset[str],
    fits_without: Callable[[Collection[str]], bool],
) -> list[SequenceState] | None:
    """Return every sequence that uses weights of `candidates` that must be released for other weights.

    None if not enough weights can be released. An empty list means that only weights used recently must be
    released; this is allowed only for a tenant that has none in use.
    """
    used = {tenant: _by_weights(queue) for tenant, queue in queues.items()}
    own = len(used.pop(asks, {}))
    given_up: dict[str, list[SequenceState]] = {}
    if fits_without(given_up):
        return None if own else []
    while not fits_without(given_up):
        found = _next_to_give_up(used, own, candidates)
        if found is None:
            return None
        tenant, key = found
        given_up[key] = used[tenant].pop(key)
    for key in list(given_up):
        if fits_without(given_up.keys() - {key}):
            del given_up[key]
    return [sequence for users in given_up.values() for sequence in users]


def _next_to_give_up(
    used: Mapping[str, Mapping[str, list[SequenceState]]], own: int, candidates: frozenset[str]
) -> tuple[str, str] | None:
    """Return the tenant and the weights to release: the newest in use of the largest eligible tenant."""
    for tenant in sorted(used, key=lambda each: len(used[each]), reverse=True):
        keeps_enough = len(used[tenant]) - 1 >= own + 1
        since = {
            key: users[0].age
            for key, users in used[tenant].items()
            if key in candidates and (keeps_enough or (not own and all(map(_had_lease, users))))
        }
        if since:
            return tenant, max(since, key=since.__getitem__)
    return None


def _by_weights(queue: TenantQueue) -> dict[str, list[SequenceState]]:
    """Group a tenant's running sequences by weights, without those of the base model alone."""
    users: dict[str, list[SequenceState]] = {}
    for sequence in queue.running:
        key = sequence.group.request.weights
        if key is not None:
            users.setdefault(key, []).append(sequence)
    return users


def _had_lease(sequence: SequenceState) -> bool:
    """Return True if the lease of a sequence has expired since its last admission."""
    lease = max(LEASE_TOKENS, sequence.length // LEASE_SHARE)
    return len(sequence.tokens) - sequence.resumed_at >= lease
