"""The LoRA backends on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.backend import BackendChoice, find_backend, unfused
from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import CLAMPED, SILU
from cotrain_workers.engine.lora.fused.tables import plan_groups
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import (
    SPECS,
    TARGETS,
    WIDE_TARGETS,
    disagreement,
    random_adapter,
    random_linears,
    run,
    segments_of,
)
from cotrain_workers.engine.model import kernel_check
from cotrain_workers.engine.model.layer_kernels import KernelSoftmax, find_softmax
from cotrain_workers.engine.routing import Segment
from cotrain_workers.engine.spec import Target
from tests.support.engine_checks import (
    bf16_gradient_cosine,
    mixed_against_alone,
    parity_with_peft,
)
from tests.support.tiny_models import FAMILIES, build_tiny
from tests.support.training import MIX, relative_error, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("sizes", [kernel_check.SIZES, kernel_check.WIDE_SIZES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [SILU, CLAMPED])
def test_the_self_test_of_experts_passes(dtype: torch.dtype, sizes: tuple[int, int], gate: int) -> None:
    assert kernel_check.disagreement(torch.device("cuda"), dtype, sizes, gate) is None


def test_rows_of_experts_have_the_same_bits_at_any_place_of_a_tile() -> None:
    module = kernel_check.RandomExperts((1024, 512), torch.device("cuda"), torch.bfloat16, 3)
    segments = kernel_check.segments_of(module, SPECS[:2], (37, 21))
    tokens = kernel_check.random_tokens(module, 58)
    together = kernel_check.run(module, segments, tokens, "fused")

    own = replace(segments[1], start=0, stop=21)
    alone = kernel_check.run(module, [own], kernel_check.Tokens(*(each[37:] for each in tokens)), "fused")

    for name in ("output", "gradient of x", "gradient of the weights"):
        assert torch.equal(together[name][37:], alone[name]), name


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_tiny(request.param, tmp_path)


@pytest.mark.parametrize("targets", [TARGETS, WIDE_TARGETS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_passes(dtype: torch.dtype, targets: Sequence[Target]) -> None:
    assert disagreement(torch.device("cuda"), dtype, targets) is None


def test_auto_is_fused() -> None:
    weight = torch.zeros(1, device="cuda", dtype=torch.bfloat16)

    assert unfused(weight) is None
    assert find_backend("auto", TARGETS, weight).name == "fused"


def test_fused_equals_seg_in_fp32() -> None:
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(3)
    sources = [random_adapter(spec, device, torch.float32, generator) for spec in SPECS]
    linears = random_linears(device, torch.float32)
    looped, fused = segments_of(sources), segments_of(sources)

    expected = run(SegmentLora(looped), looped, 192, linears)
    found = run(FusedLora(fused, 192, plan_groups(TARGETS), linears), fused, 192, linears)

    for (name, theirs), (_, ours) in zip(expected, found, strict=True):
        assert relative_error(ours, theirs) < 2e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_softmax_of_a_real_vocabulary_is_in_two_passes(softcap: float | None, dtype: torch.dtype) -> None:
    weight = torch.empty(151_936, 1, device="cuda", dtype=dtype)

    assert find_softmax(weight, softcap) is KernelSoftmax


def test_a_mixed_cycle_equals_plain_peft(folder: Path) -> None:
    assert parity_with_peft(folder, "cuda", torch.float32, "fused").gradient_error < 1e-5


def test_a_tenant_alone_has_the_bits_it_has_among_others_when_fused() -> None:
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(3)
    source = random_adapter(SPECS[0], device, torch.bfloat16, generator, WIDE_TARGETS)
    linears = random_linears(device, torch.bfloat16, WIDE_TARGETS)
    x = torch.randn(1, 300, 1024, device=device, dtype=torch.bfloat16)
    found = []
    for start, rows in ((0, 40), (77, 300)):
        segments = [Segment(start, start + 40, source, 2.0, None)]
        lora = FusedLora(segments, rows, plan_groups(WIDE_TARGETS), linears)
        row = x[:, 77 - start : 77 - start + rows] if start == 0 else x
        out = lora.linear(WIDE_TARGETS[0].name, row, linears[WIDE_TARGETS[0].name].weight, None)
        found.append(out[0, start : start + 40])

    assert torch.equal(*found)


def test_a_run_among_others_equals_the_run_alone(folder: Path) -> None:
    # Not to the bit: cuBLAS chooses kernels by shape.
    assert mixed_against_alone(folder, "cuda", torch.float32, "seg").gradient_error < 1e-5


@pytest.mark.parametrize("lora", ["seg", "fused"])
def test_gradients_on_a_bf16_base_point_where_those_of_seg_on_fp32_do(tmp_path: Path, lora: BackendChoice) -> None:
    assert bf16_gradient_cosine(build_tiny("qwen3", tmp_path), "cuda", lora) > 0.999


@pytest.mark.parametrize("lora", ["seg", "fused"])
def test_the_same_cycles_twice_give_the_same_bits(tmp_path: Path, lora: BackendChoice) -> None:
    model = build_tiny("qwen3", tmp_path)
    first, second = (Engine.load(str(model), device="cuda", lora_backend=lora) for _ in range(2))

    for cycle in range(2):
        for engine in (first, second):
            engine.run([op for tenant in MIX for op in tenant.ops(cycle)])

    for tenant in MIX:
        assert same_bits(first.adapters.state(tenant.run), second.adapters.state(tenant.run))
