"""A thread's cores: who has which, and when a step of the decoder is better off with one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from cotrain_workers.engine.cores import Contention, StepCores, keeps_bits, use_cores
from cotrain_workers.engine.engine import Engine
from tests.support.decoding import assert_same, output, request, text, trained_weights
from tests.support.tiny_models import build_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cotrain_workers.engine.decoding.model_runner import Forward
    from cotrain_workers.engine.decoding.requests import SampleOutput


class AlwaysShort(Contention):
    """A host whose cores are always wanted by others."""

    def __init__(self) -> None:
        super().__init__()
        self.is_short = True

    @override
    def note(self, wall_s: float, cpu_s: float) -> None:
        pass


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(("threads", "cores"), [(2, 2), (3, 3), (0, 1)])
def test_one_thread_computes_on_the_cores_and_each_later_one_on_a_core_alone(
    threads: int, cores: int
) -> None:
    """A second team of OpenMP has the first one sleep at every turn: training took half as long again."""

    def work() -> tuple[int, int]:
        use_cores(threads)
        with ThreadPoolExecutor(1) as writer:
            return torch.get_num_threads(), writer.submit(torch.get_num_threads).result()

    with ThreadPoolExecutor(1) as worker:
        assert worker.submit(work).result() == (cores, 1)
    assert torch.get_num_threads() == 1, "of this test's own process"


def after(*steps: tuple[int, float, float]) -> list[bool]:
    """Return what is said after so many steps of so many seconds, of which the thread computed so many."""
    contention, said = Contention(), []
    for count, wall_s, cpu_s in steps:
        for _ in range(count):
            contention.note(wall_s, cpu_s)
        said.append(contention.is_short)
    return said


def test_a_thread_that_computes_all_of_its_time_has_a_core() -> None:
    assert after((100, 0.010, 0.0098)) == [False]


def test_one_late_step_is_no_contention_and_several_are_until_cores_are_there_again() -> None:
    late, better, free = (0.100, 0.020), (0.020, 0.016), (0.010, 0.0099)
    assert after((1, *late), (1, *late), (20, *better), (20, *free)) == [False, True, True, False]


def test_a_step_of_less_than_a_millisecond_says_nothing() -> None:
    assert after((100, 0.0009, 0.0001)) == [False]


@pytest.mark.usefixtures("two_threads")
def test_a_step_takes_one_core_while_cores_are_short_and_the_rest_has_them_all() -> None:
    cores = StepCores(2)
    with cores:
        assert torch.get_num_threads() == 2
    cores.contention = AlwaysShort()

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
    """Wide enough that a product is divided among threads."""
    engine = Engine.load(str(build_tiny("qwen3", tmp_path, hidden=256, vocab=2048)))
    weights = trained_weights(engine)
    prompt = np.random.default_rng(0).integers(0, 2048, 90)
    seen: set[int] = set()

    def sampled(*, is_short: bool) -> SampleOutput:
        decoder = engine.decoder(weights.__getitem__, kv_tokens=4096, text=text)
        assert isinstance(decoder.cores, StepCores) == keeps_bits()
        if is_short and isinstance(decoder.cores, StepCores):
            decoder.cores.contention = AlwaysShort()
        of_step = decoder.runner.forward

        def counted(*args: Any) -> Forward | None:
            seen.add(torch.get_num_threads())
            return of_step(*args)

        decoder.runner.forward = counted  # type: ignore[assignment,method-assign]
        asked = request(
            "mine", prompt, "all-8", num_samples=20, max_tokens=12, prompt_logprobs=True
        )
        return output(decoder, asked)

    assert_same(sampled(is_short=False), sampled(is_short=True))
    assert seen == ({1, 2} if keeps_bits() else {2})
