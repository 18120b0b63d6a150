"""The LoRA backends on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.backend import find_backend, slow
from cotrain_workers.engine.lora.grouped import GroupedLora
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import (
    SPECS,
    TARGETS,
    disagreement,
    random_adapter,
    run,
    segments_of,
)
from tests.support.engine_checks import (
    bf16_gradient_cosine,
    gradient_passes,
    mixed_against_alone,
    parity_with_peft,
    warmed_up,
)
from tests.support.tiny_models import FAMILIES, build_tiny
from tests.support.training import MIX, relative_error, same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from cotrain_workers.engine.lora.backend import Choice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_tiny(request.param, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_passes(dtype: torch.dtype) -> None:
    assert disagreement(torch.device("cuda"), dtype) is None


def test_auto_groups_where_torch_has_a_kernel() -> None:
    weight = torch.zeros(1, device="cuda", dtype=torch.bfloat16)
    expected = "seg" if slow(weight) else "auto"

    assert find_backend("auto", TARGETS, weight).name == expected


def test_grouped_equals_seg_in_fp32() -> None:
    device, results = torch.device("cuda"), []
    torch.backends.cuda.matmul.allow_tf32 = False
    for is_grouped in (False, True):
        generator = torch.Generator().manual_seed(3)
        sources = [random_adapter(spec, device, torch.float32, generator) for spec in SPECS]
        segments = segments_of(sources, (1, 9, 40, 8, 30, 70))
        lora = GroupedLora(segments, 192, torch.float32) if is_grouped else SegmentLora(segments)
        results.append(run(lora, segments, 192, device, torch.float32))

    for name, theirs, ours in zip(results[0][0], results[0][1], results[1][1], strict=True):
        assert relative_error(ours, theirs) < 1e-6, name


def test_a_mixed_cycle_equals_plain_peft(folder: Path) -> None:
    assert parity_with_peft(folder, "cuda", torch.float32, "grouped").gradient_error < 1e-5


def test_a_run_among_others_equals_the_run_alone(folder: Path) -> None:
    # Not to the bit: cuBLAS chooses kernels by shape.
    assert mixed_against_alone(folder, "cuda", torch.float32, "grouped").weight_error < 1e-4


@pytest.mark.parametrize("lora", ["seg", "grouped"])
def test_gradients_on_a_bf16_base_point_where_those_of_seg_on_fp32_do(
    tmp_path: Path, lora: Choice
) -> None:
    assert bf16_gradient_cosine(build_tiny("qwen3", tmp_path), "cuda", lora) > 0.999


def test_the_same_cycles_twice_give_the_same_bits(tmp_path: Path) -> None:
    model = build_tiny("qwen3", tmp_path)
    first, second = (
        Engine.load(str(model), device="cuda", lora_backend="grouped") for _ in range(2)
    )

    for cycle in range(2):
        for engine in (first, second):
            engine.run([op for tenant in MIX for op in tenant.ops(cycle)])

    for tenant in MIX:
        assert same_bits(first.adapters.state(tenant.run), second.adapters.state(tenant.run))


def test_grouped_products_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """bf16 has a kernel that reads the ends of its groups on the device."""
    engine = warmed_up(build_tiny("qwen3", tmp_path), "cuda", torch.bfloat16, "grouped")
    assert slow(torch.zeros(1, device="cuda", dtype=torch.bfloat16)) is None
    real = GroupedLora.linear

    def watched(self: GroupedLora, *args: object) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(self, *args)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupedLora, "linear", watched)
        engine.run(gradient_passes())
