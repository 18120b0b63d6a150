"""Scheduler of the decoder: admission by free pages, and fair sharing of a step's tokens. Plain bookkeeping.

The tenant with the fewest pages is admitted first, and the tenant with the most is preempted
first. Within a tenant the oldest sequence is admitted first and the youngest is preempted first. Each step
advances some sequence. A tenant without running sequences may also preempt a sequence that has generated for a
minimum lease (`sequence_pages.py`). No sequence starves.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TypeVar

from cotrain_workers.engine.decoding.kv_cache import Pages, PrefixIndex
from cotrain_workers.engine.decoding.sequence import SequenceGroup, SequenceState, TenantQueue
from cotrain_workers.engine.decoding.sequence_pages import (
    Plan,
    SequencePages,
    Work,
    largest_holder,
    victims_for_pages,
    victims_for_weights,
)

T = TypeVar("T")
#: Number of keys whose attention costs about as much as one more row of a shared step.
ROW_CONTEXT = 256


class FairShare:
    """Weighted token count of each tenant. A share that a tenant cannot use is not saved.

    A step gives each tenant the same number of tokens per weight, if it has work for them. The tenant with the smallest
    count, including its next part, is served next. A tenant that generates one token per step therefore does not wait
    for a page of another tenant's prompt. This is the order of weighted fair queueing, by finish time (Demers, Keshav,
    Shenker 1989).
    """

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._weights: Mapping[str, float] = {}

    def begin(self, weights: Mapping[str, float]) -> None:
        """Set the tenants with work, and their weights. A new tenant starts at the smallest count."""
        known = self._tokens
        least = min((known[tenant] for tenant in weights if tenant in known), default=0.0)
        self._tokens = {tenant: known.get(tenant, least) for tenant in weights}
        self._weights = weights

    def give(self, tenant: str, tokens: int) -> None:
        """Add to the token count of a tenant."""
        self._tokens[tenant] += tokens / self._weights[tenant]

    def in_order(self, work: Mapping[str, deque[T]], tokens_of: Callable[[T], int]) -> Iterator[tuple[str, T]]:
        """Pop and yield the next work of the tenant with the smallest weighted token count after it.

        Tokens that `give` adds between two items affect the order of the following items.
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
        """End a step: raise each tenant without work left to the smallest count of the others."""
        short = {tenant for tenant, work in left.items() if work}
        level = [self._tokens[tenant] for tenant in short] or [max(self._tokens.values(), default=0.0)]
        for tenant, tokens in self._tokens.items():
            if tenant not in short:
                self._tokens[tenant] = max(tokens, min(level))


@dataclass(frozen=True)
class StepSizes:
    """Limits of a step, in tokens."""

    page: int
    alone: int  # rows and prompt tokens, while a single tenant has work
    shared: int  # rows and prompt tokens, while several tenants have work; keeps a step about as short as a single row
    sequences: int  # maximum number of running sequences per tenant


class DecodeScheduler:
    """Waiting and running sequences of all tenants; running sequences hold pages."""

    def __init__(self, pages: Pages, index: PrefixIndex, sizes: StepSizes) -> None:
        assert sizes.alone >= sizes.page
        self.queues: dict[str, TenantQueue] = {}  # only tenants with sequences
        self.memory = SequencePages(pages, index, sizes.page)
        self._pages = pages
        self._sizes = sizes
        self._share = FairShare()

    @property
    def running(self) -> list[SequenceState]:
        """Sequences that hold pages; within a tenant, oldest first."""
        return [sequence for queue in self.queues.values() for sequence in queue.running]

    def add(self, group: SequenceGroup) -> None:
        """Enqueue all sequences of a request."""
        queue = self.queues.setdefault(group.request.tenant, TenantQueue())
        queue.weight = group.request.tenant_weight
        queue.wait(group)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a running sequence and free its memory."""
        queue = self._queue(sequence)
        queue.running.remove(sequence)
        self.memory.strip(sequence)
        self._forget_empty(sequence.group)

    def cancel(self, group: SequenceGroup) -> list[SequenceState]:
        """Remove a request and free its memory; return its sequences that were running."""
        queue = self.queues.get(group.request.tenant, TenantQueue())
        ran = queue.cancel(group)
        for sequence in ran:
            self.memory.strip(sequence)
        self._forget_empty(group)
        return ran

    def preempt(self, sequence: SequenceState) -> None:
        """Free the memory of a running sequence and enqueue it again."""
        self._queue(sequence).preempt(sequence)
        self.memory.strip(sequence)

    def next_waiting(self, but: set[str]) -> SequenceState | None:
        """Return the sequence to admit next, without the tenants in `but`.

        Tenants without running sequences come first, then those that would hold the fewest pages.
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
        """Preempt until a sequence can have pages for its tokens and one more page; None if that is impossible.

        Returns the preempted sequences.
        """
        victims = self._victims(sequence)
        for victim in victims or ():
            self.preempt(victim)
        return victims

    def _victims(self, sequence: SequenceState) -> list[SequenceState] | None:
        """Return the sequences to preempt for a waiting one, or None if it cannot get its pages."""
        wanted, missing = self.memory.wanted(sequence)
        if missing <= 0:
            return []
        tenant = sequence.group.request.tenant
        return victims_for_pages(self.queues, self._pages, tenant, wanted, missing)

    def evict_weights_for(
        self, sequence: SequenceState, candidates: frozenset[str], fits_without: Callable[[Collection[str]], bool]
    ) -> list[SequenceState] | None:
        """Preempt all users of weights in `candidates` that must be released for a sequence's own.

        Returns the preempted sequences, or None if too few may be preempted. `fits_without` returns True if
        the weights fit once the given ones are unused.
        """
        tenant = sequence.group.request.tenant
        victims = victims_for_weights(self.queues, tenant, candidates, fits_without)
        for victim in victims or ():
            self.preempt(victim)
        return victims

    def admit(self, sequence: SequenceState) -> None:
        """Run a waiting sequence whose pages are available."""
        self.memory.give(sequence)
        sequence.resumed_at = len(sequence.tokens)
        self._queue(sequence).admit(sequence)

    def plan(self) -> Plan:
        """Choose the work of one step: within a tenant first the next row of generating sequences, then prompts.

        Between tenants, the smallest weighted token count goes first.
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
        plan.work = [work for work in plan.work if work.sequence not in plan.preempted]
        plan.blank = self.memory.blank()
        return plan

    def only_goes_on(self) -> bool:
        """Return True if the next step only continues running sequences, for any values of the unread tokens.

        No sequence is then admitted or preempted: there are pages for all running ones.
        """
        running = self.running
        if any(not each.is_prompt_stored or each.hidden is not None for each in running):
            return False
        if self._pages.free + self._pages.idle < len(running):
            return False
        waiting = self.next_waiting(set())
        return waiting is None or self._victims(waiting) is None

    def _work(self) -> dict[str, deque[SequenceState]]:
        """Return the sequences with work for a step, by tenant."""
        work: dict[str, deque[SequenceState]] = {}
        for tenant, queue in self.queues.items():
            generate: list[SequenceState] = []
            prompts: list[SequenceState] = []
            for sequence in queue.running:
                if not sequence.is_prompt_stored:
                    prompts.append(sequence)
                elif sequence.hidden is None and not sequence.is_full:
                    # The others only need their first token, or their last one is still unread.
                    generate.append(sequence)
            if generate or prompts:
                work[tenant] = deque(generate + prompts)
        return work

    def _next_tokens(self, sequence: SequenceState) -> int:
        """Return the number of tokens that a sequence computes next: at most one page of a prompt."""
        all_of_it = sequence.length if sequence.is_prompt_stored else len(sequence.group.prompt)
        return min(all_of_it - sequence.stored, self._sizes.page)

    def _plan_rows(self, plan: Plan, sequence: SequenceState, budget: int) -> int:
        """Plan the tokens that are not stored: the last one, and more only after a preemption."""
        count = min(sequence.length - sequence.stored, max(budget, 1))
        positions = range(sequence.stored, sequence.stored + count)
        take = partial(self._take_by_force, plan, sequence)
        if not self.memory.make_writable(plan, sequence, positions, take):
            return 0
        plan.work += [Work(sequence, position, position + 1) for position in positions]
        return count

    def _take_by_force(self, plan: Plan, sequence: SequenceState) -> int | None:
        """Return a page, preempting until one is free; None if `sequence` itself was preempted."""
        while (page := self.memory.take(sequence)) is None:
            victim = largest_holder(self.queues, self._pages, sequence.group.request.tenant)
            self.preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return None
        return page

    def _plan_chunks(
        self, plan: Plan, sequence: SequenceState, budget: int, planned: dict[tuple[object, bytes], object]
    ) -> int:
        """Plan pages of a prompt in order, within the budget; return the number of planned tokens.

        A page that this step computes for another sequence is left for the next step, which shares it.
        """
        group = sequence.group
        self.memory.adopt(sequence)
        parent: object = sequence.node or group.origin
        start = sequence.stored
        while start < len(group.prompt):
            stop = min(start + self._sizes.page, len(group.prompt))
            if stop - start > budget:
                break
            chunk = Work(sequence, start, stop)
            key = (parent, group.chunks[chunk.page])
            if key in planned and sequence.is_indexed and not self.memory.must_compute(chunk):
                break
            parent = planned.setdefault(key, object())
            plan.work.append(chunk)
            budget -= stop - start
            start = stop
        return start - sequence.stored

    def _queue(self, sequence: SequenceState) -> TenantQueue:
        return self.queues[sequence.group.request.tenant]

    def _forget_empty(self, group: SequenceGroup) -> None:
        tenant = group.request.tenant
        if tenant in self.queues and self.queues[tenant].is_empty:
            del self.queues[tenant]
