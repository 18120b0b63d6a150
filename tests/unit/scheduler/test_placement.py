"""Placement of new runs: on the worker that would finish them first.

Reassignment of the runs of a missing worker, and its delay.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain_scheduler.placement import (
    FIRST_TOKENS,
    MEMORY_S,
    Candidate,
    RecentTokens,
    absences,
    best,
    fits_one_more,
    rates,
    reassignments,
)
from cotrain_store.messages.fleet import WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import RunId, WorkerId

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")


def beat(**facts: Any) -> WorkerHeartbeat:
    return WorkerHeartbeat(W0, 1, "serving", "cuda", 1e4, 0, 0, 0.0, **facts)


def test_a_worker_twice_as_fast_finishes_twice_the_tokens() -> None:
    slow, fast = Candidate(W0, 1_000, 100.0), Candidate(W1, 1_900, 200.0)
    assert best([slow, fast]) == W1
    assert best([slow, Candidate(W1, 2_100, 200.0)]) == W0


def test_the_rate_of_a_worker_is_bounded_by_others_with_its_device() -> None:
    def of(name: WorkerId, device: str, tokens_per_s: float) -> WorkerHeartbeat:
        return WorkerHeartbeat(name, 1, "serving", device, tokens_per_s, 0, 0, 0.0)

    cpus = [of(W0, "cpu", 3_000.0), of(W1, "cpu", 4_600.0), of(W2, "cpu", 54_000.0)]
    assert rates(cpus) == {W0: 3_000.0, W1: 4_600.0, W2: 9_200.0}
    mixed = [of(W0, "cpu", 3_000.0), of(W1, "cuda", 40_000.0), of(W2, "cuda", 0.0)]
    assert rates(mixed) == {W0: 3_000.0, W1: 40_000.0, W2: 10_000.0}
    assert rates([]) == {}


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=8))
def test_every_worker_gets_runs_at_any_measured_rate(measured: list[float]) -> None:
    workers = [
        WorkerHeartbeat(WorkerId(f"w{n}"), 1, "serving", "cpu", rate, 0, 0, 0.0) for n, rate in enumerate(measured)
    ]
    taken, tokens = rates(workers), dict.fromkeys((one.id for one in workers), 0)
    for _ in range(5 * len(workers)):
        tokens[best([Candidate(name, tokens[name], taken[name]) for name in tokens])] += 100
    assert all(tokens.values())


def test_a_worker_without_memory_for_an_adapter_is_the_last_choice() -> None:
    full = Candidate(W0, 0, 100.0, fits_one_more=False)
    assert best([full, Candidate(W1, 1e9, 100.0)]) == W1
    assert best([full]) == W0
    with pytest.raises(ValueError, match="empty"):
        best([])


def test_a_worker_without_a_measured_rate_gets_runs() -> None:
    assert best([Candidate(W0, 10, 0.0), Candidate(W1, 5, 0.0)]) == W1


@pytest.mark.parametrize(
    ("count", "size", "limit", "fits"), [(0, 0, 10, True), (2, 6, 9, True), (2, 6, 8, False), (2, 6, 0, True)]
)
def test_a_worker_needs_memory_for_one_more_average_adapter(count: int, size: int, limit: int, fits: bool) -> None:
    worker = beat(adapters={"device": count}, adapter_bytes={"device": size}, adapter_limit_bytes=limit)
    assert fits_one_more(worker) is fits


@given(st.lists(st.floats(10, 1e5), min_size=1, max_size=6), st.lists(st.floats(1, 1e6), max_size=40))
def test_workers_differ_by_at_most_one_run_of_any_size(rates: list[float], runs: list[float]) -> None:
    tokens = {WorkerId(f"w{number}"): 0.0 for number in range(len(rates))}
    rate_of = dict(zip(tokens, rates, strict=True))
    for run in runs:
        tokens[best([Candidate(name, tokens[name], rate_of[name]) for name in tokens])] += run
    seconds = [tokens[name] / rate_of[name] for name in tokens]
    assert max(seconds) - min(seconds) <= max(runs, default=0.0) / min(rates) * (1 + 1e-9)


def test_recent_tokens_decay() -> None:
    recent = RecentTokens()
    recent.add(RunId("a"), W0, 100.0, 50.0)
    assert recent.of(W0, 50.0) == 100.0
    assert recent.of(W0, 50.0 + MEMORY_S) == pytest.approx(100 / math.e)
    assert recent.of(W0, 0.0) == 100.0  # the host's clock was set back
    assert recent.of(W1, 50.0) == 0.0


def test_a_new_run_counts_as_an_average_one_before_its_first_request() -> None:
    recent = RecentTokens()
    recent.settle(RunId("first"), W0, 0.0)
    assert recent.of(W0, 0.0) == FIRST_TOKENS
    recent.add(RunId("first"), W0, 1_000.0, 0.0)
    recent.settle(RunId("second"), W1, 0.0)
    assert recent.of(W1, 0.0) == FIRST_TOKENS + 1_000
    recent.settle(RunId("second"), W1, 0.0)
    assert recent.of(W1, 0.0) == FIRST_TOKENS + 1_000


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from([W0, W1, W2]), st.integers(0, 10_000),
            st.floats(0, 30),
        )
    )
)  # fmt: skip
def test_the_tokens_of_a_run_count_for_its_current_worker(acts: list[tuple[str, WorkerId, int, float]]) -> None:
    recent, now = RecentTokens(), 0.0
    asked: list[tuple[str, int, float]] = []
    home: dict[str, WorkerId] = {}
    for run, worker, tokens, passed_s in acts:
        now += passed_s
        recent.add(RunId(run), worker, tokens, now)
        asked.append((run, tokens, now))
        home[run] = worker
    for worker in (W0, W1, W2):
        left = [tokens * math.exp((at - now) / MEMORY_S) for run, tokens, at in asked if home[run] == worker]
        assert recent.of(worker, now) == pytest.approx(sum(left), abs=1e-6)


def test_idle_runs_are_removed_from_the_recent_tokens() -> None:
    recent = RecentTokens()
    for number in range(10_000):
        recent.add(RunId(f"run{number}"), W0, 5.0, float(number))
    assert len(recent._of_run) < 2_500


NOW = 1_000.0


def alive(name: str, runs: int = 0) -> WorkerSlot:
    worker = WorkerId(name)
    return WorkerSlot(worker, 1, WorkerHeartbeat(worker, 1, "serving", "cpu", 1.0, runs, 0, NOW))


def dead(name: str, epoch: int = 1) -> WorkerSlot:
    return WorkerSlot(WorkerId(name), epoch, None)


def reassigned(*slots: WorkerSlot, empty_for_s: float = 30.0) -> list[tuple[str, str]]:
    since = absences(slots, {}, NOW)
    pairs = reassignments(slots, since, NOW + empty_for_s, after_s=30.0)
    return [(slot.worker, successor) for slot, successor in pairs]


def test_the_serving_worker_with_the_fewest_runs_is_the_successor() -> None:
    assert reassigned(dead("a"), alive("b", 5), alive("c", 2), alive("d", 2)) == [("a", "c")]


def test_all_missing_workers_get_successors_at_once() -> None:
    assert reassigned(dead("a"), alive("b"), dead("c")) == [("a", "b"), ("c", "b")]


def test_no_worker_is_a_successor_before_the_delay_or_without_a_heartbeat() -> None:
    assert reassigned(dead("a"), alive("b"), empty_for_s=29.9) == []
    assert reassigned(dead("a"), dead("b"), empty_for_s=1e6) == []


def test_the_delay_starts_when_a_worker_is_first_missing_per_process() -> None:
    first = absences([dead("a"), alive("b")], {}, NOW)
    assert first == {("a", 1): NOW}
    assert absences([dead("a"), alive("b")], first, NOW + 9) == {("a", 1): NOW}
    assert absences([alive("a"), alive("b")], first, NOW + 9) == {}
    assert absences([dead("a", epoch=2)], first, NOW + 9) == {("a", 2): NOW + 9}
