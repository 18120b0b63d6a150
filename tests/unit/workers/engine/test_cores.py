"""Cores of each thread, and the choice of a single core for decode steps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from cotrain_workers.engine.cores import TRY_EVERY, CoreChoice, StepCores, keeps_bits, use_cores
from cotrain_workers.engine.decoding.model_runner import Forward
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from tests.support.decoding import assert_same, output, request, text, trained_weights
from tests.support.tiny_models import build_tiny


class AlwaysAlone(CoreChoice):
    """Choice of a single core, as on a host whose cores are always busy."""

    def __init__(self) -> None:
        super().__init__()
        self.is_alone = True

    @override
    def note(self, wall_s: float, cpu_s: float) -> None:
        pass


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(("threads", "cores"), [(2, 2), (3, 3), (0, 1)])
def test_the_first_thread_computes_on_all_its_cores_and_later_ones_on_one(threads: int, cores: int) -> None:
    """A second OpenMP team puts the first one to sleep at every switch. Training then took 1.5 times as long."""

    def work() -> tuple[int, int]:
        use_cores(threads)
        with ThreadPoolExecutor(1) as writer:
            return torch.get_num_threads(), writer.submit(torch.get_num_threads).result()

    with ThreadPoolExecutor(1) as worker:
        assert worker.submit(work).result() == (cores, 1)
    assert torch.get_num_threads() == 1, "of this test's own process"


def chosen(*phases: tuple[int, float, float, float]) -> list[list[bool]]:
    """Return per phase, for each step, True if it ran on one core.

    A phase has a number of steps, and three values of each step. These are seconds on all cores,
    the computing fraction of its thread, and seconds on one core.
    """
    choice, seen = CoreChoice(), []
    for count, all_s, computed, alone_s in phases:
        steps = []
        for _ in range(count):
            steps.append(choice.is_alone)
            wall_s, part = (alone_s, 0.5) if choice.is_alone else (all_s, computed)
            choice.note(wall_s, part * wall_s)
        seen.append(steps)
    return seen


def test_a_thread_that_has_its_cores_never_tries_a_single_one() -> None:
    assert not any(*chosen((1000, 0.010, 0.98, 0.005)))


def test_steps_that_wait_for_cores_use_one_until_all_are_free() -> None:
    busy, free = chosen((330, 0.280, 0.15, 0.060), (200, 0.009, 1.0, 0.0105))
    assert busy.count(False) <= 3 + 330 / TRY_EVERY
    assert free[-1] is False
    assert free.count(True) <= 3 * TRY_EVERY


def test_a_single_core_is_given_up_at_once_if_it_is_slower() -> None:
    (steps,) = chosen((320, 0.060, 0.5, 0.240))
    assert 1 <= steps.count(True) <= 320 / TRY_EVERY


def test_a_step_under_a_millisecond_does_not_count() -> None:
    assert not any(*chosen((100, 0.0009, 0.1, 0.0001)))


@pytest.mark.usefixtures("two_threads")
def test_a_step_uses_one_core_while_cores_are_busy_and_the_rest_uses_all() -> None:
    cores = StepCores(2)
    with cores:
        assert torch.get_num_threads() == 2
    cores.choice = AlwaysAlone()

    def step() -> None:
        with cores:
            assert torch.get_num_threads() == 1
            raise ValueError("in a step")

    with pytest.raises(ValueError, match="in a step"):
        step()
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as writer:
        assert writer.submit(torch.get_num_threads).result() == 1


@pytest.mark.usefixtures("two_threads")
@pytest.mark.numerics
def test_samples_have_the_same_bits_on_one_core_and_on_all(tmp_path: Path) -> None:
    """The model is wide enough for a product to be divided among threads."""
    engine = Engine.load(str(build_tiny("qwen3", tmp_path, hidden=256, vocab=2048)))
    weights = trained_weights(engine)
    prompt = np.random.default_rng(0).integers(0, 2048, 90)
    seen: set[int] = set()

    def sampled(*, is_alone: bool) -> SampleOutput:
        decoder = engine.decoder(weights.__getitem__, kv_tokens=4096, text=text)
        assert isinstance(decoder.cores, StepCores) == keeps_bits()
        if is_alone and isinstance(decoder.cores, StepCores):
            decoder.cores.choice = AlwaysAlone()
        of_step = decoder.runner.forward

        def counted(*args: Any) -> Forward | None:
            seen.add(torch.get_num_threads())
            return of_step(*args)

        decoder.runner.forward = counted  # type: ignore[assignment,method-assign]
        asked = request("mine", prompt, "all-8", num_samples=20, max_tokens=12, prompt_logprobs=True)
        return output(decoder, asked)

    assert_same(sampled(is_alone=False), sampled(is_alone=True))
    assert seen == ({1, 2} if keeps_bits() else {2})
