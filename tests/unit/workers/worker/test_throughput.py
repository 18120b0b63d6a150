"""What cycles took says how much a cycle may hold, whatever their size."""

from __future__ import annotations

import random

import pytest

from cotrain_workers.worker.throughput import Throughput

MICRO_BATCH = 8192


class Machine:
    """Takes its time for each forward and for each token, within a quarter of that."""

    def __init__(self, overhead_s: float, tokens_per_s: float) -> None:
        self._overhead_s, self._per_token_s = overhead_s, 1 / tokens_per_s
        self._rng = random.Random(0)
        self.rate = 1 / (self._per_token_s + overhead_s / MICRO_BATCH)

    def run(self, tokens: int) -> tuple[int, int, float]:
        forwards = -(-tokens // MICRO_BATCH)
        seconds = forwards * self._overhead_s + tokens * self._per_token_s
        return forwards, tokens, seconds * self._rng.uniform(0.8, 1.25)


def after_small_cycles(machine: Machine, found: Throughput, cycles: int, most: int) -> float:
    rng = random.Random(1)
    for _ in range(cycles):
        found.measure(*machine.run(rng.randint(1, most)))
    return found.tokens_per_s(MICRO_BATCH)


def after_full_cycles(machine: Machine, found: Throughput, cycles: int, period_s: float) -> float:
    """Return what is believed after cycles that hold what is believed before each."""
    for _ in range(cycles):
        tokens = max(1, int(found.tokens_per_s(MICRO_BATCH) * period_s))
        found.measure(*machine.run(tokens))
    return found.tokens_per_s(MICRO_BATCH)


def test_small_cycles_alone_do_not_make_a_machine_look_slow() -> None:
    """A cycle of six tokens takes 20 ms here: 300 tokens per second, of 45,000."""
    machine = Machine(0.02, 50_000)
    believed = after_small_cycles(machine, Throughput(50_000), 2000, most=12)
    assert machine.rate / 2 < believed < machine.rate * 2


def test_cycles_that_are_always_small_are_measured_all_the_same() -> None:
    """A large model on a processor: ten seconds hold a hundred tokens, and a wrong guess a thousand."""
    machine = Machine(1.5, 10)
    believed = after_small_cycles(machine, Throughput(400), 60, most=200)
    assert believed == pytest.approx(machine.rate, rel=0.5)


@pytest.mark.parametrize("first", [50, 5_000, 500_000])
def test_a_wrong_guess_is_put_right_by_the_cycles_that_follow_it(first: float) -> None:
    machine = Machine(0.02, 50_000)
    believed = after_full_cycles(machine, Throughput(first), 20, period_s=10)
    assert believed == pytest.approx(machine.rate, rel=0.3)


def test_a_machine_that_is_shared_from_now_on_is_believed_within_ten_cycles() -> None:
    found = Throughput(50_000)
    after_full_cycles(Machine(0.02, 50_000), found, 20, period_s=10)
    slower = Machine(0.02, 12_500)
    assert after_full_cycles(slower, found, 10, 10) == pytest.approx(slower.rate, rel=0.3)


def test_one_cycle_that_took_long_says_little() -> None:
    found = Throughput(50_000)
    before = after_full_cycles(Machine(0.02, 50_000), found, 20, period_s=10)
    found.measure(13, 100_000, 60.0)
    assert found.tokens_per_s(MICRO_BATCH) == pytest.approx(before, rel=0.2)


def test_a_cycle_without_passes_says_nothing() -> None:
    found = Throughput(1000)
    found.measure(0, 0, 3.0)
    assert found.tokens_per_s(MICRO_BATCH) == 1000
