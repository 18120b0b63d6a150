from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain_workers.engine.lora import backend as lora_backend
from cotrain_workers.engine.lora import grouped as lora_grouped
from cotrain_workers.engine.lora.backend import BackendUnfit, KernelsBroken, LoraBackend, choose, find_backend
from cotrain_workers.engine.lora.fused.operators import missing_kernels
from cotrain_workers.engine.lora.grouped import GroupedLora
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import (
    TARGETS,
    disagreement,
    faster_than_fused,
    first_layer,
    layer_seconds,
    random_linears,
)
from cotrain_workers.engine.routing import Segment, TrainingLora
from cotrain_workers.engine.spec import Target
from tests.support.lora_problem import CPU
from tests.support.training import NewEngine


def on_cuda(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a stand-in for a weight on CUDA that lets the self-test run on the CPU."""
    return SimpleNamespace(is_cuda=True, device=CPU, dtype=dtype)


def corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lora_grouped.weight_gradient
    monkeypatch.setattr(lora_grouped, "weight_gradient", lambda *args: 1.5 * real(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_finds_no_difference_in_correct_products(dtype: torch.dtype) -> None:
    assert disagreement(CPU, dtype) is None


def test_the_self_test_names_the_differing_value(monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt(monkeypatch)

    reason = disagreement(CPU, torch.float32)

    assert reason is not None
    assert "gradient of 0.self_attn.q_proj A differs from that of a loop" in reason


def test_on_a_cpu_the_backend_does_not_depend_on_the_load() -> None:
    weight = torch.zeros(1)

    assert find_backend("auto", TARGETS, weight) == LoraBackend("seg", torch.float32)
    assert find_backend("grouped", TARGETS, weight) == LoraBackend("grouped", torch.float32)


def test_on_cuda_many_short_segments_are_grouped() -> None:
    assert choose(segments=1, tokens=512) == "seg"
    assert choose(segments=64, tokens=8192) == "grouped"
    assert choose(segments=3, tokens=16384) == "seg"
    assert choose(segments=16, tokens=16384) == "grouped"


def test_an_unsupported_input_of_grouped_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnfit, match=r"does not take torch\.float64"):
        find_backend("grouped", TARGETS, torch.zeros(1, dtype=torch.float64))
    odd = Target("0.mlp.up_proj", "mlp", 64, 36)
    with pytest.raises(BackendUnfit, match=r"0\.mlp\.up_proj is 64 x 36, not of multiples of 8"):
        find_backend("grouped", [odd], torch.zeros(1))
    find_backend("grouped", [replace(odd, family="unembed")], torch.zeros(1))

    corrupt(monkeypatch)
    with pytest.raises(BackendUnfit, match="differs from that of a loop"):
        find_backend("grouped", TARGETS, torch.zeros(1))


def test_a_device_with_wrong_grouped_products_gets_a_loop_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lora_backend, "slow", lambda weight: None)
    assert find_backend("auto", TARGETS, on_cuda()).name == "auto"

    corrupt(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert find_backend("auto", TARGETS, on_cuda()).name == "seg"

    assert "differs from that of a loop" in caplog.text


def test_a_device_without_a_kernel_gets_a_loop_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    with caplog.at_level(logging.WARNING):
        assert find_backend("auto", TARGETS, on_cuda()).name == "seg"
        assert find_backend("auto", TARGETS, on_cuda(torch.float32)).name == "seg"

    assert "capability 8.0" in caplog.text
    assert "of bfloat16, not of torch.float32" in caplog.text


def test_without_kernels_fused_is_refused_and_auto_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lora_backend, "slow", lambda weight: None)
    reason = missing_kernels(CPU)
    assert reason is not None

    with caplog.at_level(logging.WARNING):
        assert find_backend("auto", TARGETS, on_cuda()).name == "auto"
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
    monkeypatch.setattr(lora_backend, "slow", lambda weight: "no kernel")
    fail_fused(monkeypatch, error)

    found = find_backend("auto", TARGETS, on_cuda())

    assert found.name == "seg"
    name = type(error).__name__
    assert found.fallback_reason == (f"not fused: its kernels do not run: {name}; not grouped: no kernel")


@pytest.mark.parametrize("error", [TypeError("shrink() got 3"), KeyError("BM"), AssertionError()])
def test_a_defect_of_the_kernels_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fail_fused(monkeypatch, error)

    with pytest.raises(KernelsBroken, match=type(error).__name__):
        find_backend("auto", TARGETS, on_cuda())


def fail_fused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the fused kernels fail when they are tried. The grouped products are correct."""

    def disagree(*_: Any, backend: str = "grouped", **__: Any) -> None:
        if backend == "fused":
            raise error

    monkeypatch.setattr(lora_backend, "missing_kernels", lambda device: None)
    monkeypatch.setattr(lora_backend, "disagreement", disagree)


def test_an_engine_with_the_fastest_backend_has_no_fallback_reason(new_engine: NewEngine) -> None:
    assert new_engine().facts.lora_fallback == ""


def test_the_backend_is_part_of_the_numerics(new_engine: NewEngine) -> None:
    seg, grouped = new_engine(), new_engine(lora_backend="grouped")

    assert seg.facts.numerics.differences(grouped.facts.numerics) == ["lora seg, now grouped"]
    assert seg.facts.numerics_id != grouped.facts.numerics_id


def test_auto_uses_the_chosen_backend() -> None:
    assert isinstance(LoraBackend("auto", torch.float32).of([], 64), SegmentLora)
    assert isinstance(LoraBackend("grouped", torch.float32).of([], 64), GroupedLora)


TWO_LAYERS = [Target(f"{layer}.{name}", "attn", 64, 64) for layer in (0, 1) for name in ("q_proj", "o_proj")]


class Weight:
    """Stand-in for a weight on CUDA whose checks run on the CPU."""

    is_cuda, device, dtype = True, CPU, torch.float32


def test_the_first_layer_ends_before_a_name_comes_again() -> None:
    assert first_layer(TWO_LAYERS) == TWO_LAYERS[:2]
    assert first_layer([*TWO_LAYERS[:1], Target("lm_head", "unembed", 64, 9)]) == TWO_LAYERS[:1]


def test_every_backend_is_timed_on_a_layer() -> None:
    def seg(segments: Sequence[Segment], _rows: int, _layer: Sequence[Target]) -> TrainingLora:
        assert all(segment.grads for segment in segments)
        return SegmentLora(segments)

    def grouped(segments: Sequence[Segment], rows: int, _: Sequence[Target]) -> TrainingLora:
        return GroupedLora(segments, rows, torch.float32)

    linears = random_linears(CPU, torch.float32)
    ways = {"seg": seg, "grouped": grouped}
    found = layer_seconds(ways, TARGETS, linears, CPU, torch.float32)

    assert found.keys() == ways.keys()
    assert all(0 < seconds < 60 for seconds in found.values())


@pytest.mark.parametrize(("fused", "is_taken"), [(1.0, True), (1.1, True), (1.2, False)])
def test_a_faster_grouped_needs_a_margin(fused: float, is_taken: bool) -> None:
    reason = faster_than_fused({"fused": fused, "grouped": 1.0})

    assert (reason == "") == is_taken
    if reason:
        assert reason == "one layer takes 1200.00 ms, grouped 1000.00 ms"


@pytest.mark.parametrize(
    ("seconds", "name", "reason"),
    [
        ({"fused": 1.0, "grouped": 2.0}, "fused", ""),
        ({"fused": 2.0, "grouped": 1.0}, "auto", "not fused: one layer takes 2000.00 ms, grouped 1000.00 ms"),
        (None, "fused", ""),
    ],
)
def test_auto_takes_the_faster_backend(
    seconds: dict[str, float] | None, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*_: object) -> dict[str, float]:
        if seconds is None:
            raise torch.OutOfMemoryError
        return seconds

    for check in ("unfused", "slow", "ungrouped"):
        monkeypatch.setattr(lora_backend, check, lambda *_: None)
    monkeypatch.setattr(lora_backend, "check_device", lambda _device: None)
    monkeypatch.setattr(lora_backend, "layer_seconds", timed)

    found = find_backend("auto", TARGETS, Weight(), {})  # type: ignore[arg-type]

    assert (found.name, found.fallback_reason) == (name, reason)
    untimed = find_backend("auto", TARGETS, Weight(), {}, times=False)  # type: ignore[arg-type]
    assert untimed.name == "fused"
