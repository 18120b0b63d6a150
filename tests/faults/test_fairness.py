"""The checks of fairness and of fencing themselves, on made-up records."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cotrain_scheduler.planner import select
from cotrain_scheduler.queue import FairQueue
from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, RunQueue
from tests.faults.fairness import Accepted, Cycle, Turns, turns
from tests.faults.invariants import accepted_from_replaced
from tests.support.planning import waiting_of

QUANTUM = 8
KINDS = {
    "forward": OpKind.FORWARD, "forward_backward": OpKind.FORWARD_BACKWARD,
    "optim_step": OpKind.OPTIM_STEP, "save_weights": OpKind.SAVE,
}  # fmt: skip


def asked(count: int, tokens: int = 10, at_s: float = 0.0) -> dict[int, Accepted]:
    return {n: Accepted(at_s, "forward", tokens) for n in range(count)}


def test_equal_turns_are_fair() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1, "b": 1}) for n in range(9)]
    seen = turns(cycles, {"a": asked(10), "b": asked(10)}, quantum_tokens=10)
    assert seen.violations == []
    assert seen.passed_over == 18


def test_a_run_that_gets_all_the_turns_is_reported() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1}) for n in range(9)]
    seen = turns(cycles, {"a": asked(10), "b": asked(10)}, quantum_tokens=10)
    assert seen.violations[0] == "I9 a was served 50 tokens, and at most 40 were its turn beside b"


def test_a_run_with_nothing_accepted_is_not_passed_over() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1}) for n in range(9)]
    seen = turns(cycles, {"a": asked(9), "b": asked(10, at_s=100.0)}, quantum_tokens=10)
    assert (seen.violations, seen.passed_over) == ([], 8)


def test_requests_after_a_step_wait_for_the_next_cycle() -> None:
    step = {0: Accepted(0.0, "optim_step", 0), 1: Accepted(0.0, "forward", 10)}
    seen = turns([Cycle(1.0, {"b": 1})], {"b": step}, quantum_tokens=10)
    assert seen.passed_over == 0


def test_each_worker_gives_turns_to_its_own_runs() -> None:
    of_one = [Cycle(1.0 + n, {"a": 1}, "w0") for n in range(12)]
    of_another = [Cycle(1.5, {"b": 1}, "w1"), *(Cycle(1.6 + n, {"c": 1}, "w1") for n in range(12))]
    cycles = sorted([*of_one, *of_another], key=lambda cycle: cycle.planned_at)
    seen = turns(cycles, {run: asked(13) for run in "abc"}, quantum_tokens=10)
    assert {violation.partition(" was")[0] for violation in seen.violations} == {"I9 c"}


def test_a_scheduler_restart_begins_a_new_round() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1}) for n in range(5)]
    waiting = {"a": asked(10), "b": asked(10)}
    assert turns(cycles, waiting, quantum_tokens=10).violations
    assert turns(cycles, waiting, quantum_tokens=10, restarted_s=[2.5]).violations == []


def test_the_first_slice_of_an_incomplete_pass_counts_as_a_request() -> None:
    accepted = {"a": asked(1, tokens=1100), "b": asked(9, tokens=2)}
    whole_slice = Cycle(1.0, {"a": 0}, ran={"a": 825})
    assert turns([whole_slice], accepted, quantum_tokens=8).violations == []
    too_much = [Cycle(1.0 + n, {"a": 0}, ran={"a": 825}) for n in range(2)]
    assert turns(too_much, accepted, quantum_tokens=8).violations


def drawn(draw: random.Random) -> dict[int, Accepted]:
    """Draw the requests of one run and their times."""
    asked: dict[int, Accepted] = {}
    at_s = 0.0
    for _ in range(3):
        at_s += draw.randint(0, 25)
        for route in draw.choices(list(KINDS), weights=[1, 4, 1, 1], k=draw.randint(2, 6)):
            is_pass = route.startswith("forward")
            tokens = 1100 if draw.random() < 0.1 else draw.randint(2, 24)
            at_s += draw.random()
            asked[len(asked)] = Accepted(at_s, route, tokens if is_pass else 0)
    return asked


def played(seed: int) -> Turns:
    """Run the planner for a worker that divides no pass and uses a random share of its allowance."""
    draw = random.Random(seed)
    accepted = {f"r{n}": drawn(draw) for n in range(4)}
    done: Counter[str] = Counter()
    fair_queue, cycles, now = FairQueue(), [], 0.0
    while any(done[run] < len(asked) for run, asked in accepted.items()):
        now += 1.0
        rows = [
            RunQueue(RunId(run), TenantId(run), WorkerId("w0"), ops)
            for run, asked in accepted.items()
            if (ops := tuple(
                QueuedOp(RunId(run), seq, KINDS[one.route], one.tokens, "inline", 1, one.at_s)
                for seq, one in asked.items() if seq >= done[run] and one.at_s < now
            ))
        ]  # fmt: skip
        if not rows:
            continue
        waiting = waiting_of(rows, fair_queue)
        chosen = select(waiting, fair_queue, draw.choice([1, 2, 3, 8, 40]), QUANTUM)
        fair_queue = chosen.fair_queue
        divided = draw.sample(list(chosen.allowances), k=len(chosen.allowances))
        goes_back = set() if draw.random() < 0.5 else set(divided[1:])
        over = [op for op in chosen.ops if op.request_id not in goes_back]
        served = Counter(str(op.run) for op in over)
        done.update(served)
        cycles.append(Cycle(now, served))
    return turns(cycles, accepted, QUANTUM)


def test_plans_are_fair_for_any_use_of_an_allowance() -> None:
    seen = [played(seed) for seed in range(200)]
    assert [one.violations for one in seen if one.violations] == []
    assert sum(one.passed_over for one in seen) > 2_000


def test_a_planner_without_turns_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "_end", lambda *_: 0.0)
    assert any(played(seed).violations for seed in range(50))


REPLACED = ["worker.entered 1 w0", "worker.before_run 1 a:1", "worker.entered 2 w0"]


def test_a_commit_after_the_successor_entered_is_reported() -> None:
    seen = [*REPLACED, "worker.before_commit 1 a:1", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(seen) == ["I6 1 committed a:1 after w0 was another's"]


def test_a_fenced_commit_is_accepted_by_the_check() -> None:
    seen = [*REPLACED, "worker.before_commit 1 a:1", "worker.after_commit 2 a:1"]
    assert accepted_from_replaced(seen) == []


def test_a_commit_that_began_earlier_may_be_recorded_later() -> None:
    seen = ["worker.before_commit 1 a:1", "worker.entered 2 w0", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(["worker.entered 1 w0", *seen]) == []


def test_a_worker_with_another_id_replaces_no_worker() -> None:
    seen = ["worker.entered 2 w1", "worker.before_commit 1 a:1", "worker.after_commit 1 a:1"]
    assert accepted_from_replaced(["worker.entered 1 w0", *seen]) == []
