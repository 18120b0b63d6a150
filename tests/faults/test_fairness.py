"""Who was served while others waited, and how much of that is unfair."""

from __future__ import annotations

from tests.faults.fairness import Accepted, Cycle, turns


def asked(count: int, tokens: int = 10, at_s: float = 0.0) -> dict[int, Accepted]:
    return {n: Accepted(at_s, "forward", tokens) for n in range(count)}


def test_equal_turns_are_fair() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1, "b": 1}) for n in range(9)]
    seen = turns(cycles, {"a": asked(10), "b": asked(10)}, quantum_tokens=10)
    assert seen.violations == []
    assert seen.passed_over == 18


def test_one_that_gets_all_the_turns_is_told() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1}) for n in range(9)]
    seen = turns(cycles, {"a": asked(10), "b": asked(10)}, quantum_tokens=10)
    assert seen.violations[0] == "I9 a was served 40 tokens, and at most 30 were its turn beside b"


def test_whoever_has_nothing_accepted_is_not_passed_over() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1}) for n in range(9)]
    seen = turns(cycles, {"a": asked(9), "b": asked(10, at_s=100.0)}, quantum_tokens=10)
    assert (seen.violations, seen.passed_over) == ([], 8)


def test_what_comes_behind_a_step_waits_for_the_next_cycle() -> None:
    step = {0: Accepted(0.0, "optim_step", 0), 1: Accepted(0.0, "forward", 10)}
    seen = turns([Cycle(1.0, {"b": 1})], {"b": step}, quantum_tokens=10)
    assert seen.passed_over == 0


def test_each_worker_gives_turns_to_its_own_runs() -> None:
    of_one = [Cycle(1.0 + n, {"a": 1}, "w0") for n in range(9)]
    of_another = [Cycle(1.5, {"b": 1}, "w1"), *(Cycle(1.6 + n, {"c": 1}, "w1") for n in range(9))]
    cycles = sorted([*of_one, *of_another], key=lambda cycle: cycle.planned_at)
    seen = turns(cycles, {run: asked(10) for run in "abc"}, quantum_tokens=10)
    assert {violation.partition(" was")[0] for violation in seen.violations} == {"I9 c"}


def test_a_scheduler_that_starts_again_begins_a_new_round() -> None:
    cycles = [Cycle(1.0 + n, {"a": 1}) for n in range(5)]
    waiting = {"a": asked(10), "b": asked(10)}
    assert turns(cycles, waiting, quantum_tokens=10).violations
    assert turns(cycles, waiting, quantum_tokens=10, restarted_s=[2.5]).violations == []
