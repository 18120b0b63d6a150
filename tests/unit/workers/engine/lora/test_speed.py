from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cotrain_workers.engine.lora import backend as lora_backend
from cotrain_workers.engine.lora.backend import find_backend
from cotrain_workers.engine.lora.grouped import GroupedLora
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import (
    TARGETS,
    faster_than_fused,
    first_layer,
    layer_seconds,
    random_linears,
)
from cotrain_workers.engine.routing import Segment, TrainingLora
from cotrain_workers.engine.spec import Target
from tests.support.lora_problem import CPU

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
