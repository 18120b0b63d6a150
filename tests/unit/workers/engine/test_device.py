from __future__ import annotations

import os
import resource
import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

import cotrain_workers
from cotrain_workers.engine import device
from cotrain_workers.engine.decoding.model_runner import ForwardResult
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.device import (
    TRY_EVERY,
    CoreChoice,
    DeviceLost,
    StepCores,
    check_device,
    is_out_of_memory,
    keeps_bits,
    to_device,
    unordered_writes,
    use_cores,
)
from cotrain_workers.engine.engine import Engine
from tests.support.decoding import assert_same, output, request, text, trained_weights
from tests.support.tiny_models import build_tiny
from tests.warm.popen import run

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SOURCE_ROOT = Path(device.__file__).parents[2]


def failing_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(_: torch.device) -> None:
        raise error

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)


def test_a_device_on_which_every_call_fails_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(RuntimeError("CUDA error: device-side assert triggered"), monkeypatch)
    with pytest.raises(DeviceLost, match="device-side assert"):
        check_device(CUDA)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")])
def test_a_full_device_is_not_lost(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(error, monkeypatch)
    check_device(CUDA)


CAPTURE = "CUDA error: operation failed due to a previous error during capture"
FULL = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError("std::bad_alloc"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in …"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: cuModuleLoadData"),
    RuntimeError("cudaHostAlloc failed: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    RuntimeError("NCCL error: Call to CUDA function failed. Cuda failure 2 'out of memory'"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("unable to mmap 8 bytes from file </m>: Cannot allocate memory (12)"),
)
NOT_FULL = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
    RuntimeError(CAPTURE),
    ValueError("out of memory"),
)


@pytest.mark.parametrize("error", FULL, ids=str)
def test_an_error_of_full_memory_is_recognized(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", NOT_FULL, ids=str)
def test_another_error_is_not_one_of_full_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("earlier", [FULL[0], NOT_FULL[0]], ids=["full", "another"])
def test_a_failed_capture_counts_as_the_error_that_ended_it(earlier: Exception) -> None:
    failed = RuntimeError(CAPTURE)
    failed.__context__ = earlier  # as of an error raised while `torch.cuda.graph` is left

    assert is_out_of_memory(failed) == is_out_of_memory(earlier)


def test_a_cpu_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(RuntimeError("there is no CUDA here"), monkeypatch)
    check_device(torch.device("cpu"))


def test_products_on_cuda_may_precede_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks this once, at the first product, and would refuse all later ones."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    assert cotrain_workers.__file__
    runpy.run_path(cotrain_workers.__file__)  # as an import does

    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_segments_of_cuda_memory_expand_unless_the_operator_chose(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    assert cotrain_workers.__file__
    runpy.run_path(cotrain_workers.__file__)  # as an import does

    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


def test_unordered_writes_are_allowed_only_in_their_block() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        with unordered_writes():
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    with unordered_writes():
        pass
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("source", [np.arange(4.0), torch.arange(4.0)])
def test_values_arrive_in_their_own_type_or_the_requested_one(source: np.ndarray) -> None:
    assert to_device(source, CPU).tolist() == [0, 1, 2, 3]
    assert to_device(np.arange(4), CPU).dtype == torch.int64
    assert to_device(source, CPU, torch.bfloat16).dtype == torch.bfloat16


def test_values_are_copied_through_pinned_memory_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        calls.append("pin")
        return self

    def move(self: torch.Tensor, *args: object, **settings: object) -> torch.Tensor:
        calls.append((args, settings))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", move)

    to_device(np.arange(4), torch.device("cuda", 0))

    assert calls[:2] == ["pin", ((torch.device("cuda", 0),), {"non_blocking": True})]


# Ten tensors of 6 MB, allocated and freed repeatedly. Prints the page faults of the last round.
CHURN = """
import resource, sys, torch
from cotrain_workers.engine.device import keep_freed_memory
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
    done = run(command, cwd=SOURCE_ROOT)
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
