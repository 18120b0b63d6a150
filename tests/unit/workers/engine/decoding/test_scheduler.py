"""The schedule against a pretended device: what it plans is possible, in order, and ends."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotrain_workers.engine.decoding.pages import Pages, PrefixIndex
from cotrain_workers.engine.decoding.scheduler import DecodeScheduler
from cotrain_workers.engine.decoding.sequence import Group, SequenceState
from cotrain_workers.engine.decoding.step import Chunk, Plan, Row
from tests.support.decoding import request

PAGE, BUDGET, MOST = 4, 12, 6
HIDDEN = torch.zeros(1)


class Pretender:
    """Runs a schedule with no model: every sequence generates until its limit."""

    def __init__(self, count: int) -> None:
        self.pages = Pages(count)
        self.scheduler = DecodeScheduler(
            self.pages, PrefixIndex(self.pages), page_tokens=PAGE, step_tokens=BUDGET, most=MOST
        )
        self.written: dict[int, int] = {}  # page -> positions of it that are in place
        self.steps = 0
        self.preempted = 0

    def add(self, arrival: int, prompt: list[int], num_samples: int, more: int) -> Group:
        each = request(f"r{arrival}", np.array(prompt), num_samples=num_samples)
        group = Group(each, arrival, PAGE, len(prompt) + more, None)
        self.scheduler.add(group.sequences)
        return group

    def step(self) -> Plan:
        for sequence in self.scheduler.candidates():
            if not self.scheduler.fits(sequence):
                break
            self.scheduler.admit(sequence)
        plan = self.scheduler.plan()
        self.preempted += len(plan.preempted)
        self.check(plan)
        for work in plan.work:
            if isinstance(work, Chunk):
                self.scheduler.store(work, HIDDEN if work.ends_prompt else None)
            else:
                work.sequence.stored = work.stop
        ready = [row.sequence for row in plan.rows if row.is_last]
        for sequence in list(self.scheduler.running):
            if sequence.hidden is not None:
                sequence.hidden = None
                ready.append(sequence)
        for sequence in ready:
            sequence.tokens.append(1)
            if sequence.length >= sequence.group.limit:
                self.scheduler.remove(sequence)
        self.steps += 1
        return plan

    def check(self, plan: Plan) -> None:
        """A plan writes each position once, to a page that only its sequence holds."""
        runs = self.scheduler.running
        assert len(runs) <= MOST
        assert [s.age for s in runs] == sorted(s.age for s in runs)
        prompt_tokens = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        assert prompt_tokens <= BUDGET
        assert len(plan.rows) + prompt_tokens <= BUDGET + MOST
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
    """What is planned for a sequence begins where it stands and leaves no gap."""
    own = [work for work in plan.work if work.sequence is sequence]
    at = sequence.stored
    for work in own:
        assert work.start == at
        at = work.stop
    assert len({isinstance(work, Row) for work in own}) <= 1


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(PROMPTS, st.integers(1, 4), st.integers(1, 10), st.integers(0, 5)), max_size=12
    ),
    st.integers(8, 20),
)
def test_everybody_finishes_and_every_page_comes_back(
    requests: list[tuple[list[int], int, int, int]], count: int
) -> None:
    pretender = Pretender(count)
    groups = []
    for arrival, (prompt, num_samples, more, steps_before) in enumerate(requests):
        for _ in range(steps_before):
            pretender.step()
        groups.append(pretender.add(arrival, prompt, num_samples, more))

    while pretender.scheduler.running or pretender.scheduler.waiting:
        pretender.step()
        assert pretender.steps < 10_000

    for group in groups:
        assert all(sequence.length == group.limit for sequence in group.sequences)
    assert pretender.pages.free + pretender.pages.idle == count


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.integers(1, 10)), min_size=2, max_size=10))
def test_the_oldest_advances_in_every_step(requests: list[tuple[list[int], int]]) -> None:
    pretender = Pretender(8)
    for arrival, (prompt, more) in enumerate(requests):
        pretender.add(arrival, prompt, 1, more)
    oldest = pretender.scheduler.waiting[0]

    while oldest.length < oldest.group.limit:
        before = (oldest.length, oldest.stored)
        pretender.step()
        assert (oldest.length, oldest.stored) > before


def test_pages_run_out_and_the_youngest_gives_way() -> None:
    pretender = Pretender(5)
    old = pretender.add(0, [0, 0, 0], 1, 9)
    young = pretender.add(1, [1, 1, 1], 1, 9)

    while old.sequences[0].length < old.limit:
        pretender.step()

    assert pretender.preempted > 0
    assert young.sequences[0].tokens  # they survive preemption


def test_after_preemption_generated_tokens_are_rows_of_one_step() -> None:
    pretender = Pretender(20)
    group = pretender.add(0, [0, 1], 1, 9)
    for _ in range(5):
        pretender.step()
    sequence = group.sequences[0]
    assert len(sequence.tokens) == 5
    pretender.scheduler.remove(sequence)
    pretender.scheduler.add([sequence])

    pretender.step()  # the prompt is cached: its partial page is shared, then copied
    plan = pretender.step()

    assert [row.position for row in plan.rows] == [sequence.length - 2]
    assert len(sequence.tokens) == 7


def test_samples_wait_for_the_prompt_and_share_its_pages() -> None:
    pretender = Pretender(20)
    group = pretender.add(0, list(range(8)), 3, 4)

    first = pretender.step()
    second = pretender.step()

    assert [(chunk.start, chunk.stop) for chunk in first.chunks] == [(0, 4), (4, 8)]
    assert second.chunks == []
    assert len({tuple(s.pages[:2]) for s in group.sequences}) == 1


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    pretender = Pretender(20)
    pretender.add(0, list(range(30)), 1, 1)

    sizes = []
    while pretender.scheduler.running or pretender.scheduler.waiting:
        sizes.append(sum(chunk.stop - chunk.start for chunk in pretender.step().chunks))

    assert sizes == [12, 12, 6]


def test_a_shared_last_page_is_copied_before_it_is_written() -> None:
    pretender = Pretender(20)
    group = pretender.add(0, list(range(6)), 2, 4)
    pretender.step()
    shared = group.sequences[0].pages[1]

    plan = pretender.step()

    assert plan.copies == {group.sequences[0].pages[1]: shared}
    assert shared not in plan.blank
    assert group.sequences[0].pages[1] not in plan.blank
