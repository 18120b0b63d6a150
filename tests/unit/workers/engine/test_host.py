"""Memory of the host, within a container's limit, and its cores."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from cotrain_workers.engine import host
from cotrain_workers.engine.decoding.model_runner import ForwardResult
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.host import (
    TRY_EVERY,
    CoreChoice,
    StepCores,
    free_host_bytes,
    keeps_bits,
    memory_limit_bytes,
    use_cores,
)
from tests.support.decoding import assert_same, output, request, text, trained_weights
from tests.support.tiny_models import build_tiny
from tests.warm.popen import run


@pytest.mark.parametrize(
    ("limit", "free"), [("max", 2048 * 1024), ("1000000", 999_000), ("99999999", 2048 * 1024), ("10", 0)]
)
def test_the_limit_of_a_container_applies_if_it_is_lower(tmp_path: Path, limit: str, free: int) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  9999 kB\nMemAvailable:    2048 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000\n")

    assert free_host_bytes(memory, tmp_path) == free


def test_cached_files_of_a_container_do_not_count_as_used(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable:    2048 kB\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 300\ninactive_file 500\n")

    assert free_host_bytes(memory, tmp_path) == 900


def test_outside_a_container_the_free_memory_is_that_of_the_host(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemAvailable: 1 kB\n")

    assert free_host_bytes(memory, tmp_path / "absent") == 1024
    assert free_host_bytes() > 0


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({"memory.max": "5000"}, "0::/"),
        ({"memory.max": "max", "box/memory.max": "5000"}, "0::/box"),
        ({"memory/memory.limit_in_bytes": "5000"}, "8:pids:/\n5:memory:/"),
        (
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/box/memory.limit_in_bytes": "5000"},
            "5:cpu,memory:/box",
        ),
    ],
)
def test_the_limit_is_read_from_either_kind_of_control_group(tmp_path: Path, files: dict[str, str], own: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    (tmp_path / "cgroup").write_text(f"{own}\n")
    assert memory_limit_bytes(tmp_path, tmp_path / "cgroup") == 5000


def test_without_a_limit_the_memory_is_that_of_the_host(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path / "absent", tmp_path / "absent") >= free_host_bytes()


# Ten tensors of 6 MB, allocated and freed repeatedly. Prints the page faults of the last round.
CHURN = """
import resource, sys, torch
from cotrain_workers.engine.host import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print(-1)
    raise SystemExit
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2048, 768) for _ in range(10)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", CHURN, mode]
    done = run(command, cwd=Path(host.__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_kept_memory_causes_no_page_faults() -> None:
    kept = page_faults("keep")
    if kept < 0:
        pytest.skip("the C library has no mallopt")

    pages_of_one_round = 10 * 2048 * 768 * 4 // resource.getpagesize()
    assert kept < pages_of_one_round / 10


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

        def counted(*args: Any) -> ForwardResult | None:
            seen.add(torch.get_num_threads())
            return of_step(*args)

        decoder.runner.forward = counted  # type: ignore[assignment,method-assign]
        asked = request("mine", prompt, "all-8", num_samples=20, max_tokens=12, prompt_logprobs=True)
        return output(decoder, asked)

    assert_same(sampled(is_alone=False), sampled(is_alone=True))
    assert seen == ({1, 2} if keeps_bits() else {2})
