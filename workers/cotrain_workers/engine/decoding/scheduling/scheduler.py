"""Which sequences run in the next step: admitted by pages, in the order of tenants and of age.

Plain bookkeeping. Of any number of tenants the smallest holder is admitted first, and the largest gives way;
a step gives all of them the same number of tokens, as far as they have use for them. Within a tenant the
oldest goes first and the youngest gives way. Each step brings some sequence closer to its end, and no other
takes a place again before it has used it for a while: none starves.

Whose work a decoder step takes next: of the tenant that would then have had the fewest tokens over its weight. Pure.

What it would have had then, not what it has had: so one that generates a token per step waits for no page of another's prompt.
Weighted fair queueing orders packets so, by when each would end (Demers, Keshav, Shenker 1989).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TypeVar

from cotrain_workers.engine.decoding.scheduling.pages import Pages, PrefixIndex
from cotrain_workers.engine.decoding.scheduling.preemption import (
    largest_holder,
    victims_for_pages,
    victims_for_weights,
)
from cotrain_workers.engine.decoding.scheduling.queues import TenantQueue
from cotrain_workers.engine.decoding.scheduling.sequence_pages import SequencePages
from cotrain_workers.engine.decoding.sequence import Group, SequenceState
from cotrain_workers.engine.decoding.step import Chunk, Plan, Row

T = TypeVar("T")


class FairShare:
    """Counts the tokens over its weight that each tenant was given; what one could not use is not saved up."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._weights: Mapping[str, float] = {}

    def begin(self, weights: Mapping[str, float]) -> None:
        """Note which tenants have work, and their weights. One that is new begins level with who has had least."""
        known = self._tokens
        least = min((known[tenant] for tenant in weights if tenant in known), default=0.0)
        self._tokens = {tenant: known.get(tenant, least) for tenant in weights}
        self._weights = weights

    def give(self, tenant: str, tokens: int) -> None:
        """Count what a tenant was given."""
        self._tokens[tenant] += tokens / self._weights[tenant]

    def in_order(
        self, work: Mapping[str, deque[T]], tokens_of: Callable[[T], int]
    ) -> Iterator[tuple[str, T]]:
        """Take work out of `work`, of the tenant that would then have had the fewest tokens over its weight.

        What is given while this waits counts for what comes next.
        """

        def end(tenant: str) -> float:
            return self._tokens[tenant] + tokens_of(work[tenant][0]) / self._weights[tenant]

        heap = [(end(tenant), at, tenant) for at, tenant in enumerate(work)]
        heapify(heap)
        while heap:
            _, at, tenant = heappop(heap)
            yield tenant, work[tenant].popleft()
            if work[tenant]:
                heappush(heap, (end(tenant), at, tenant))

    def end(self, left: Mapping[str, deque[T]]) -> None:
        """End a step: who had all its work done is level with the one that has had the fewest of the others."""
        short = {tenant for tenant, work in left.items() if work}
        level = [self._tokens[tenant] for tenant in short] or [
            max(self._tokens.values(), default=0.0)
        ]
        for tenant, tokens in self._tokens.items():
            if tenant not in short:
                self._tokens[tenant] = max(tokens, min(level))


#: Keys that cost a row of a shared step about as much as one row more.
ROW_CONTEXT = 256


@dataclass(frozen=True)
class StepSizes:
    """What a step may hold, in tokens."""

    page: int
    alone: int
    """Rows and prompt tokens, while one tenant has work."""
    shared: int
    """While several have: then a step shall not take much longer than one with a single row."""
    sequences: int
    """That one tenant may have running."""


class DecodeScheduler:
    """Sequences that wait, and sequences that run: those hold pages."""

    def __init__(self, pages: Pages, index: PrefixIndex, sizes: StepSizes) -> None:
        assert sizes.alone >= sizes.page
        self.queues: dict[str, TenantQueue] = {}  # of tenants with any sequence
        self.memory = SequencePages(pages, index, sizes.page)
        self._pages = pages
        self._sizes = sizes
        self._share = FairShare()

    @property
    def running(self) -> list[SequenceState]:
        """Return every sequence that holds pages; of a tenant, the oldest first."""
        return [sequence for queue in self.queues.values() for sequence in queue.running]

    def add(self, group: Group) -> None:
        """Let all sequences of a request wait."""
        queue = self.queues.setdefault(group.request.tenant, TenantQueue())
        queue.weight = group.request.tenant_weight
        queue.wait(group)

    def remove(self, sequence: SequenceState) -> None:
        """Take a running sequence out, and free what it holds."""
        queue = self._queue(sequence)
        queue.running.remove(sequence)
        self.memory.strip(sequence)
        self._forget_empty(sequence.group)

    def cancel(self, group: Group) -> list[SequenceState]:
        """Take a whole request out, and free what it holds; return those of its sequences that ran."""
        queue = self.queues.get(group.request.tenant, TenantQueue())
        ran = queue.cancel(group)
        for sequence in ran:
            self.memory.strip(sequence)
        self._forget_empty(group)
        return ran

    def preempt(self, sequence: SequenceState) -> None:
        """Let a running sequence wait, without its memory."""
        self._queue(sequence).preempt(sequence)
        self.memory.strip(sequence)

    def next_waiting(self, but: set[str]) -> SequenceState | None:
        """Return who is to be admitted next, of no tenant in `but`.

        First those who run nothing, then those who would hold the least.
        """
        found: list[tuple[bool, int, SequenceState]] = []
        for tenant, queue in self.queues.items():
            if tenant in but or len(queue.running) >= self._sizes.sequences:
                continue
            sequence = queue.first()
            if sequence is not None:
                pages = self._pages.used[tenant] + sequence.length // self._sizes.page
                found.append((bool(queue.running), pages, sequence))
        return min(found, key=lambda each: each[:2])[2] if found else None

    def preempt_for(self, sequence: SequenceState) -> list[SequenceState] | None:
        """Have pages for all that a sequence holds so far, and one more; None if there cannot be so many.

        Returns who was preempted for it.
        """
        victims = self._victims(sequence)
        for victim in victims or ():
            self.preempt(victim)
        return victims

    def _victims(self, sequence: SequenceState) -> list[SequenceState] | None:
        """Return who would have to give way to a waiting sequence, or None if it cannot have its pages."""
        wanted, missing = self.memory.wanted(sequence)
        if missing <= 0:
            return []
        tenant = sequence.group.request.tenant
        return victims_for_pages(self.queues, self._pages, tenant, wanted, missing)

    def evict_weights_for(
        self,
        sequence: SequenceState,
        candidates: frozenset[str],
        fits_without: Callable[[Collection[str]], bool],
    ) -> list[SequenceState] | None:
        """Preempt all users of those weights of `candidates` that must give way to a sequence's; None if none will.

        `fits_without` tells whether its weights have room once others are not in use.
        """
        tenant = sequence.group.request.tenant
        victims = victims_for_weights(self.queues, tenant, candidates, fits_without)
        for victim in victims or ():
            self.preempt(victim)
        return victims

    def admit(self, sequence: SequenceState) -> None:
        """Let a waiting sequence run; it has room."""
        self.memory.give(sequence)
        sequence.resumed_at = len(sequence.tokens)
        self._queue(sequence).admit(sequence)

    def plan(self) -> Plan:
        """Choose the work of one step: of a tenant first a row for all who generate, then prompts.

        Between tenants, each time of the one that would then have had the fewest tokens over its weight.
        """
        plan, work = Plan(), self._work()
        is_shared = len(self.queues) > 1
        budget = self._sizes.shared if is_shared else self._sizes.alone
        planned: dict[tuple[object, bytes], object] = {}
        self._share.begin({tenant: queue.weight for tenant, queue in self.queues.items()})
        for tenant, sequence in self._share.in_order(work, self._next_tokens):
            most = self._sizes.page if is_shared else budget
            if sequence in plan.preempted:
                tokens = 0
            elif sequence.is_prompt_stored:
                tokens = self._plan_rows(plan, sequence, most)
                budget -= tokens * (sequence.length // ROW_CONTEXT * is_shared)
            else:
                tokens = self._plan_chunks(plan, sequence, most, planned)
            self._share.give(tenant, tokens)
            budget -= tokens
            if budget <= 0:
                break
        self._share.end(work)
        # Some may have been preempted after they were planned, for a tenant that holds less.
        plan.rows = [row for row in plan.rows if row.sequence not in plan.preempted]
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence not in plan.preempted]
        plan.blank = self.memory.blank()
        return plan

    def only_goes_on(self) -> bool:
        """Return whether the next step, whatever the tokens unread, only takes those further that run now.

        Then no one begins, and none gives way to another: pages are there for all.
        """
        running = self.running
        if any(not each.is_prompt_stored or each.hidden is not None for each in running):
            return False
        if self._pages.free + self._pages.idle < len(running):
            return False
        waiting = self.next_waiting(set())
        return waiting is None or self._victims(waiting) is None

    def _work(self) -> dict[str, deque[SequenceState]]:
        """Return who wants something of a step, by tenant."""
        work: dict[str, deque[SequenceState]] = {}
        for tenant, queue in self.queues.items():
            generate: list[SequenceState] = []
            prompts: list[SequenceState] = []
            for sequence in queue.running:
                if not sequence.is_prompt_stored:
                    prompts.append(sequence)
                elif sequence.hidden is None and not sequence.is_full:
                    # Others wait for their first token only, or for their last to be read.
                    generate.append(sequence)
            if generate or prompts:
                work[tenant] = deque(generate + prompts)
        return work

    def _next_tokens(self, sequence: SequenceState) -> int:
        """Return how many tokens a sequence wants next, of a prompt a page at most."""
        all_of_it = sequence.length if sequence.is_prompt_stored else len(sequence.group.prompt)
        return min(all_of_it - sequence.stored, self._sizes.page)

    def _plan_rows(self, plan: Plan, sequence: SequenceState, budget: int) -> int:
        """Plan the tokens that are not in place: the last one, and more only after a preemption."""
        count = min(sequence.length - sequence.stored, max(budget, 1))
        positions = range(sequence.stored, sequence.stored + count)
        take = partial(self._take_by_force, plan, sequence)
        if not self.memory.make_writable(plan, sequence, positions, take):
            return 0
        plan.rows += [Row(sequence, position) for position in positions]
        return count

    def _take_by_force(self, plan: Plan, sequence: SequenceState) -> int | None:
        """Take a page, preempting until there is one; None if it was `sequence` that had to give way."""
        while (page := self.memory.take(sequence)) is None:
            victim = largest_holder(self.queues, self._pages, sequence.group.request.tenant)
            self.preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
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
        self.memory.adopt(sequence)
        parent: object = sequence.node or group.origin
        start = sequence.stored
        while start < len(group.prompt):
            stop = min(start + self._sizes.page, len(group.prompt))
            if stop - start > budget:
                break
            chunk = Chunk(sequence, start, stop)
            key = (parent, group.chunks[chunk.page])
            if key in planned and sequence.is_indexed and not self.memory.must_compute(chunk):
                break
            parent = planned.setdefault(key, object())
            plan.chunks.append(chunk)
            budget -= stop - start
            start = stop
        return start - sequence.stored

    def _queue(self, sequence: SequenceState) -> TenantQueue:
        return self.queues[sequence.group.request.tenant]

    def _forget_empty(self, group: Group) -> None:
        tenant = group.request.tenant
        if tenant in self.queues and self.queues[tenant].is_empty:
            del self.queues[tenant]
