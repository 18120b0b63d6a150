"""Errors of the device, memory that is full, and copies to the device."""

from __future__ import annotations

import os
import runpy

import numpy as np
import pytest
import torch

import cotrain_workers
from cotrain_workers.engine.device import DeviceLost, check_device, is_out_of_memory, to_device, unordered_writes

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


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
