"""Decode schedule on a simulated device: its plans are possible, in order, and end."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_workers.engine.decoding.kv_cache import Pages, PrefixIndex
from cotrain_workers.engine.decoding.scheduler import DecodeScheduler, StepSizes
from cotrain_workers.engine.decoding.sequence import SequenceGroup, SequenceState
from cotrain_workers.engine.decoding.sequence_pages import LEASE_TOKENS, Plan, Work
from tests.support.decoding import request

PAGE, BUDGET, SHARED, LIMITS = 4, 12, 8, 6
SIZES = StepSizes(PAGE, alone=BUDGET, shared=SHARED, sequences=LIMITS)
HIDDEN = torch.zeros(1)


def rows_of(plan: Plan) -> list[Work]:
    return [work for work in plan.work if not work.is_prompt]


def chunks_of(plan: Plan) -> list[Work]:
    return [work for work in plan.work if work.is_prompt]


class Pretender:
    """Schedule without a model. Every sequence generates tokens up to its limit."""

    def __init__(self, count: int, sizes: StepSizes = SIZES) -> None:
        self.pages = Pages(count)
        self.sizes = sizes
        self.scheduler = DecodeScheduler(self.pages, PrefixIndex(self.pages), sizes)
        self.begun: dict[tuple[int, int], SequenceState] = {}  # by age
        self.decoded: Counter[str] = Counter()  # tokens by tenant
        self.steps = 0
        self.preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.queues)

    def add(
        self, arrival: int, prompt: list[int], num_samples: int, more: int, tenant: str = "", weight: float = 1.0
    ) -> SequenceGroup:
        each = request(f"r{arrival}", np.array(prompt), num_samples=num_samples, tenant=tenant, tenant_weight=weight)
        group = SequenceGroup(each, arrival, PAGE, len(prompt) + more, None)
        self.scheduler.add(group)
        return group

    def of(self, group: SequenceGroup) -> list[SequenceState]:
        """Return the sequences of a request that have begun."""
        return [sequence for sequence in self.begun.values() if sequence.group is group]

    def step(self) -> Plan:
        while (sequence := self.scheduler.next_waiting(set())) is not None:
            preempted = self.scheduler.preempt_for(sequence)
            if preempted is None:
                break
            self.preempted += len(preempted)
            self.scheduler.admit(sequence)
            self.begun[sequence.age] = sequence
        plan = self.scheduler.plan()
        self.preempted += len(plan.preempted)
        self.check(plan)
        for work in plan.work:
            if work.is_prompt:
                self.scheduler.memory.store(work, HIDDEN if work.ends_prompt else None)
            else:
                work.sequence.stored = work.stop
        ready = [each.sequence for each in rows_of(plan) if each.ends_sequence]
        for sequence in self.scheduler.running:
            if sequence.hidden is not None:
                sequence.hidden = None
                ready.append(sequence)
        for sequence in ready:
            sequence.tokens.append(1)
            self.decoded[sequence.group.request.tenant] += 1
            if sequence.length >= sequence.group.limit:
                self.scheduler.remove(sequence)
        self.steps += 1
        return plan

    def check(self, plan: Plan) -> None:
        """Check that a plan writes each position once, to a page that only its sequence holds."""
        runs = self.scheduler.running
        for queue in self.scheduler.queues.values():
            assert len(queue.running) <= self.sizes.sequences
            ages = [sequence.age for sequence in queue.running]
            assert ages == sorted(ages)
        prompt_tokens = sum(chunk.stop - chunk.start for chunk in chunks_of(plan))
        assert len(rows_of(plan)) + prompt_tokens <= self.sizes.alone + self.sizes.page
        kv_slots = set()
        for work in plan.work:
            assert work.sequence in runs
            for position in range(work.start, work.stop):
                page = work.sequence.pages[position // PAGE]
                assert not self.pages.is_shared(page)
                assert (page, position % PAGE) not in kv_slots
                kv_slots.add((page, position % PAGE))
        for sequence in runs:
            assert_continues(sequence, plan)


def assert_continues(sequence: SequenceState, plan: Plan) -> None:
    """Check that the planned work of a sequence starts at its position and has no gap."""
    own = [work for work in plan.work if work.sequence is sequence]
    at = sequence.stored
    for work in own:
        assert work.start == at
        at = work.stop
    assert len({work.is_prompt for work in own}) <= 1


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            PROMPTS, st.integers(1, 4), st.integers(1, 10), st.integers(0, 5),
            st.sampled_from(["a", "b", "c"]),
        ),
        max_size=12,
    ),
    st.integers(8, 20),
)  # fmt: skip
def test_every_request_finishes_and_every_page_is_freed(
    requests: list[tuple[list[int], int, int, int, str]], count: int
) -> None:
    pretender = Pretender(count)
    groups = []
    for arrival, (prompt, num_samples, more, steps_before, tenant) in enumerate(requests):
        for _ in range(steps_before):
            pretender.step()
        groups.append(pretender.add(arrival, prompt, num_samples, more, tenant))

    while pretender.busy:
        pretender.step()
        assert pretender.steps < 10_000

    for group in groups:
        sequences = pretender.of(group)
        assert len(sequences) == group.request.num_samples
        assert all(sequence.length == group.limit for sequence in sequences)
    assert pretender.pages.free + pretender.pages.idle == count
    assert not any(pretender.pages.used.values())


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.integers(1, 10)), min_size=2, max_size=10))
def test_the_oldest_sequence_advances_in_every_step(requests: list[tuple[list[int], int]]) -> None:
    pretender = Pretender(8)
    groups = [pretender.add(arrival, prompt, 1, more) for arrival, (prompt, more) in enumerate(requests)]
    oldest = groups[0].next()
    assert oldest is not None

    while oldest.length < oldest.group.limit:
        before = (oldest.length, oldest.stored)
        pretender.step()
        assert (oldest.length, oldest.stored) > before


def test_the_youngest_sequence_is_preempted_when_no_page_is_free() -> None:
    pretender = Pretender(5)
    old = pretender.add(0, [0, 0, 0], 1, 9)
    young = pretender.add(1, [1, 1, 1], 1, 9)

    pretender.step()
    while pretender.of(old)[0].length < old.limit:
        pretender.step()

    assert pretender.preempted > 0
    assert pretender.of(young)[0].tokens  # tokens are kept during preemption


def test_after_preemption_generated_tokens_are_rows_of_one_step() -> None:
    pretender = Pretender(20)
    group = pretender.add(0, [0, 1], 1, 9)
    for _ in range(5):
        pretender.step()
    (sequence,) = pretender.of(group)
    assert len(sequence.tokens) == 5
    pretender.scheduler.preempt(sequence)

    pretender.step()  # the prompt is cached: its partial page is shared, then copied
    plan = pretender.step()

    assert [row.start for row in rows_of(plan)] == [sequence.length - 2]
    assert len(sequence.tokens) == 7


def test_samples_wait_for_the_prompt_and_share_its_pages() -> None:
    pretender = Pretender(20)
    group = pretender.add(0, list(range(8)), 3, 4)

    first = pretender.step()
    second = pretender.step()

    assert [(chunk.start, chunk.stop) for chunk in chunks_of(first)] == [(0, 4), (4, 8)]
    assert chunks_of(second) == []
    assert len(pretender.of(group)) == 3
    assert len({tuple(s.pages[:2]) for s in pretender.of(group)}) == 1


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    pretender = Pretender(20)
    pretender.add(0, list(range(30)), 1, 1)

    sizes = []
    while pretender.busy:
        sizes.append(sum(chunk.stop - chunk.start for chunk in chunks_of(pretender.step())))

    assert sizes == [12, 12, 6]


def test_a_shared_last_page_is_copied_before_it_is_written() -> None:
    pretender = Pretender(20)
    group = pretender.add(0, list(range(6)), 2, 4)
    pretender.step()
    (first,) = pretender.of(group)
    shared = first.pages[1]

    plan = pretender.step()

    assert plan.copies == {first.pages[1]: shared}
    assert shared not in plan.blank
    assert first.pages[1] not in plan.blank


# ---- Fairness between tenants ---------------------------------------------------------------------


def jain(tokens: Counter[str]) -> float:
    """Return Jain's index of fairness: 1 if all values are equal, 1 / n if one tenant has everything."""
    values = list(tokens.values())
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


LARGE = StepSizes(PAGE, alone=64, shared=24, sequences=32)


def test_tenants_with_any_kind_of_load_get_equal_tokens() -> None:
    """Loads: many requests, one with many samples, long answers, long prompts, and later requests."""
    pretender = Pretender(4_000, LARGE)
    for at in range(200):
        pretender.add(at, [0, at % 7], 1, 30, "many")
    pretender.add(300, [1] * 5, 1_000, 40, "samples")
    for at in range(400, 430):
        pretender.add(at, [at % 5], 8, 200, "long")
    for at in range(500, 600):
        pretender.add(at, [at, at + 1] * 20, 4, 60, "prompts")
    for _ in range(50):
        pretender.step()
    pretender.decoded.clear()
    for at in range(600):
        if at % 3 == 0:
            pretender.add(1_000 + at, [at], 6, 25, "later")
        pretender.step()
        if at == 20:
            pretender.decoded.clear()  # until each has more rows than its share

    assert set(pretender.decoded) == {"many", "samples", "long", "prompts", "later"}
    assert jain(pretender.decoded) >= 0.99


@pytest.mark.parametrize(("heavier", "lighter"), [(4.0, 1.0), (1.0, 0.1), (10.0, 0.1)])
def test_tenants_get_tokens_in_proportion_to_their_weights(heavier: float, lighter: float) -> None:
    pretender = Pretender(4_000, LARGE)
    pretender.add(0, [1], 1_000, 200, "a", heavier)
    pretender.add(1, [2], 1_000, 200, "b", lighter)
    for at in range(200):
        pretender.step()
        if at == 20:
            pretender.decoded.clear()  # until each has more rows than its share
    had = pretender.decoded
    assert abs(had["a"] / heavier - had["b"] / lighter) <= LARGE.page / lighter
    assert had["b"] > 0


def test_a_changed_weight_applies_from_the_next_request() -> None:
    pretender = Pretender(4_000, LARGE)
    pretender.add(0, [1], 1_000, 200, "a")
    pretender.add(1, [2], 1_000, 200, "b")
    for _ in range(50):
        pretender.step()
    assert abs(pretender.decoded["a"] - pretender.decoded["b"]) <= LARGE.page
    pretender.decoded.clear()
    pretender.add(2, [1], 1, 200, "a", 3.0)
    for _ in range(50):
        pretender.step()
    assert abs(pretender.decoded["a"] / 3 - pretender.decoded["b"]) <= LARGE.page


def test_a_light_tenant_gets_all_it_needs_without_accumulating_credit() -> None:
    pretender = Pretender(4_000, LARGE)
    for at in range(4):
        pretender.add(at, [0], 1_000, 200, f"heavy{at % 2}")
    light = pretender.add(10, [1], 1, 100, "light")
    pretender.step()
    for _ in range(99):
        pretender.step()
    assert pretender.decoded["light"] == 100
    assert pretender.of(light)[0].length == light.limit
    pretender.decoded.clear()
    pretender.add(11, [1], 1_000, 200, "light")
    for _ in range(100):
        pretender.step()

    assert pretender.decoded["light"] <= 100 * LARGE.shared // 3 + LARGE.shared


def test_a_newcomer_next_to_long_sequences_needs_one_step_more_than_alone() -> None:
    """Scaled from 20 requests of 64 x 1,900 tokens. Memory for 20 of these sequences, all of it in use."""
    pretender = Pretender(20 * 24, LARGE)
    for at in range(20):
        pretender.add(at, [at], 64, 95, "heavy")
    for _ in range(60):
        pretender.step()
    assert pretender.pages.free == 0
    alone = Pretender(20 * 24, LARGE)

    for each, tenant in ((pretender, "light"), (alone, "light")):
        each.add(100, [1, 2, 3], 1, 8, tenant)
        each.steps = 0
        while each.decoded["light"] < 8:
            each.step()

    assert alone.steps == 8
    assert pretender.steps <= alone.steps + 1


@pytest.mark.parametrize("count", [1, 3])
def test_a_generating_tenant_gets_a_row_per_step_next_to_long_prompts(count: int) -> None:
    """A page is, as on a CPU, more than a shared step holds. A row per step is less than the tenant's share."""
    pretender = Pretender(1_000, StepSizes(PAGE, alone=BUDGET, shared=PAGE - 1, sequences=LIMITS))
    for at in range(count):
        pretender.add(at, [at, *range(1, 400)], 1, 1, f"long{at}")
    for _ in range(3):
        pretender.step()
    pretender.add(count, [0], 1, 20, "short")
    while not pretender.decoded["short"]:
        pretender.step()
    steps = pretender.steps

    while "short" in pretender.scheduler.queues:
        pretender.step()

    assert pretender.steps - steps == 19
    assert pretender.busy


@pytest.mark.parametrize("count", [2, 5, 24, 60])
def test_many_newcomers_each_begin_within_their_turn(count: int) -> None:
    """Each of n tenants gets a row in every 1 + n / (rows of a step) steps."""
    pretender = Pretender(400, LARGE)
    pretender.add(0, [0], 1_000, 300, "heavy")
    for _ in range(40):
        pretender.step()

    for at in range(count):
        pretender.add(at + 1, [1], 1, 3, f"light{at}")
    for _ in range(3 * (2 + count // LARGE.shared)):
        pretender.step()

    assert all(pretender.decoded[f"light{at}"] == 3 for at in range(count))


def test_a_sequence_that_holds_all_memory_is_preempted_after_its_lease() -> None:
    pretender = Pretender(101, LARGE)
    giant = pretender.add(0, [0] * 100, 1, 300, "giant")
    while pretender.pages.free + pretender.pages.idle > 1:
        pretender.step()
    pretender.add(1, [1] * 6, 1, 8, "light")

    steps = 0
    while pretender.decoded["light"] < 8:
        pretender.step()
        steps += 1
    assert steps <= LEASE_TOKENS + 8 + 1
    while pretender.busy:
        pretender.step()

    assert pretender.of(giant)[0].length == giant.limit
    assert pretender.preempted >= 1


def test_two_sequences_too_large_together_run_in_turns_of_one_lease() -> None:
    pretender = Pretender(201, LARGE)
    groups = [pretender.add(at, [at], 1, 790, f"t{at}") for at in range(2)]

    while pretender.busy:
        pretender.step()
        assert pretender.steps < 10_000

    assert all(pretender.of(group)[0].length == group.limit for group in groups)
    assert pretender.preempted <= 2 * 790 // LEASE_TOKENS + 2
