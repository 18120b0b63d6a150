from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain_workers.engine.lora import backend as lora_backend
from cotrain_workers.engine.lora.backend import BackendUnfit, KernelsBroken, LoraBackend, find_backend
from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import missing_kernels
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import TARGETS
from tests.support.lora_problem import CPU
from tests.support.training import NewEngine


def on_cuda(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a stand-in for a weight on CUDA that lets the self-check run on the CPU."""
    return SimpleNamespace(is_cuda=True, device=CPU, dtype=dtype)


def test_on_a_cpu_auto_is_the_loop_without_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert find_backend("auto", TARGETS, torch.zeros(1)) == LoraBackend("seg")
    assert caplog.text == ""


def test_a_backend_computes_by_its_name() -> None:
    assert isinstance(LoraBackend("seg").of([], 64), SegmentLora)
    assert isinstance(LoraBackend("fused").of([], 64), FusedLora)


def test_without_kernels_fused_is_refused_and_auto_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    reason = missing_kernels(CPU)
    if reason is None:
        pytest.skip("kernels run here")

    with caplog.at_level(logging.WARNING):
        found = find_backend("auto", TARGETS, on_cuda())

    assert found.name == "seg"
    assert found.fallback_reason == f"not fused: {reason}"
    assert f"LoRA is not fused with the base model's products: {reason}" in caplog.text
    with pytest.raises(BackendUnfit, match=f"'fused' cannot be used: {reason}"):
        find_backend("fused", TARGETS, torch.zeros(1))
    with pytest.raises(BackendUnfit, match=r"its kernels do not take torch\.float64"):
        find_backend("fused", TARGETS, torch.zeros(1, dtype=torch.float64))


class OutOfResources(Exception):
    """Exception like Triton's, which has no built-in base class but `Exception`."""


@pytest.mark.parametrize(
    "error", [OutOfResources("shared memory"), RuntimeError("no C compiler"), FileNotFoundError("gcc")]
)
def test_kernels_that_cannot_run_are_replaced_and_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_fused(monkeypatch, error)

    found = find_backend("auto", TARGETS, on_cuda())

    assert found.name == "seg"
    assert found.fallback_reason == f"not fused: its kernels do not run: {type(error).__name__}"


@pytest.mark.parametrize("error", [TypeError("shrink() got 3"), KeyError("BM"), AssertionError()])
def test_a_defect_of_the_kernels_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fail_fused(monkeypatch, error)

    with pytest.raises(KernelsBroken, match=type(error).__name__):
        find_backend("auto", TARGETS, on_cuda())


def fail_fused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the fused kernels fail when they are tried."""

    def disagree(*_: Any) -> None:
        raise error

    monkeypatch.setattr(lora_backend, "missing_kernels", lambda device: None)
    monkeypatch.setattr(lora_backend, "disagreement", disagree)


def test_auto_on_cuda_is_fused_if_the_kernels_agree_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_backend, "missing_kernels", lambda device: None)
    monkeypatch.setattr(lora_backend, "disagreement", lambda *_: None)
    assert find_backend("auto", TARGETS, on_cuda()).name == "fused"

    monkeypatch.setattr(lora_backend, "disagreement", lambda *_: "its output differs")
    found = find_backend("auto", TARGETS, on_cuda())
    assert (found.name, found.fallback_reason) == ("seg", "not fused: its output differs")


def test_an_engine_with_the_fastest_backend_has_no_fallback_reason(new_engine: NewEngine) -> None:
    assert new_engine().facts.lora_fallback == ""


def test_the_backend_is_part_of_the_numerics(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_backend, "unfused", lambda *_: None)
    seg, fused = new_engine(), new_engine(lora_backend="fused", fusion=False)

    assert seg.facts.numerics.differences(fused.facts.numerics) == ["lora seg, now fused"]
    assert seg.facts.numerics_id != fused.facts.numerics_id
