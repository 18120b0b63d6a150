"""The promises of the engine on CUDA; `bench engine_check` prints the same figures, `bench engine` the speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Load, ReverseKl, Save, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.engine_checks import bf16_gradient_cosine, mixed_against_alone, parity_with_peft
from tests.support.kl import kl_datums, kl_parity, random_weights, started
from tests.support.tiny_models import FAMILIES, build_tiny
from tests.support.training import MIX, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_tiny(request.param, tmp_path)


def test_a_mixed_cycle_equals_plain_peft(folder: Path) -> None:
    parity = parity_with_peft(folder, "cuda", torch.float32)

    assert parity.gradient_error < 1e-5
    assert parity.logprob_error < 2e-5


def test_a_run_among_others_equals_the_run_alone(folder: Path) -> None:
    # Not to the bit: cuBLAS chooses kernels by shape.
    assert mixed_against_alone(folder, "cuda", torch.float32).gradient_error < 1e-5


def test_gradients_on_a_bf16_base_point_where_those_on_fp32_do(folder: Path) -> None:
    assert bf16_gradient_cosine(folder, "cuda") > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_load_brings_back_the_bits_that_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    engine = Engine.load(str(build_tiny("qwen3", tmp_path)), device="cuda", dtype=dtype)
    tenant = MIX[0]
    engine.run(tenant.ops(0))
    before = engine.adapters.state(tenant.run)
    saved = engine.run([Save(tenant.run, 5, optimizer=True)]).outputs[tenant.run, 5]
    assert isinstance(saved, SaveOutput)
    engine.run(tenant.ops(1))

    engine.run([Load(tenant.run, 10, "tinker://r/weights/x", saved.weights, saved.optimizer)])

    assert same_bits(engine.adapters.state(tenant.run), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_cycles_twice_give_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_tiny("qwen3", tmp_path)
    first, second = (Engine.load(str(model), device="cuda", dtype=dtype) for _ in range(2))

    for cycle in range(2):
        for engine in (first, second):
            engine.run([op for tenant in MIX for op in tenant.ops(cycle)])

    for tenant in MIX:
        assert same_bits(first.adapters.state(tenant.run), second.adapters.state(tenant.run))


def test_a_neighbour_full_of_nan_changes_no_bit(tmp_path: Path) -> None:
    model = build_tiny("qwen3", tmp_path)
    clean, poisoned = (Engine.load(str(model), device="cuda") for _ in range(2))
    neighbour, *victims = MIX
    for engine in (clean, poisoned):
        engine.run([tenant.ops(0)[0] for tenant in MIX])
    state = poisoned.adapters.state(neighbour.run)
    state.weights.fill_(np.nan)
    poisoned.adapters.restore(neighbour.run, state)

    for engine in (clean, poisoned):
        engine.run([op for tenant in MIX for op in tenant.ops(0)[1:]])

    for tenant in victims:
        assert same_bits(clean.adapters.state(tenant.run), poisoned.adapters.state(tenant.run))


def test_a_reverse_kl_equals_a_dense_oracle(folder: Path) -> None:
    engine = started(Engine.load(str(folder), device="cuda", dtype=torch.float32))
    reference = random_weights(AdapterSpec(3, seed=21), engine.adapters.layout_of)

    parity = kl_parity(engine, folder, ReverseKl("a", 1, kl_datums(0), reference, 0.8))

    assert parity.loss_error < 2e-5
    assert parity.gradient_error < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_reverse_kl_twice_gives_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_tiny("qwen3", tmp_path)
    first, second = (started(Engine.load(str(model), device="cuda", dtype=dtype)) for _ in range(2))
    reference = random_weights(AdapterSpec(3, seed=21), first.adapters.layout_of)

    for engine in (first, second):
        engine.run([ReverseKl("a", 1, kl_datums(0), reference, 0.8)])

    assert same_bits(first.adapters.state("a"), second.adapters.state("a"))
