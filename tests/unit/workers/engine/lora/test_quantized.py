"""Quantized base models compared with base models of their dequantized weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.quantized import Quantization, QuantizedWeight
from cotrain_workers.engine.model.configuration import UnsupportedModel
from cotrain_workers.engine.model.model_source import NoModel
from tests.support.decoding import decoder_of, finish, request, trained_weights, trainer_logprobs
from tests.support.draws import variant
from tests.support.shared_base import load_plain
from tests.support.tiny_models import build_tiny
from tests.support.training import MIX, ModelFolder, same_bits

Dequantized = Callable[[Quantization], Path]

KINDS: tuple[Quantization, ...] = ("int8", "fp8", "nf4")
FAMILY = "qwen2"  # with biases


@pytest.fixture(scope="module")
def dequantized(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Dequantized:
    """Return a function that writes the tiny model with the dequantized weights of a kind."""

    @cache
    def written(kind: Quantization) -> Path:
        network: Any = load_plain(model_folder(FAMILY), torch.float32)
        network = network.requires_grad_(requires_grad=False)
        for name, module in network.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                weight = QuantizedWeight(module.weight, kind).dense()
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
        folder = tmp_path_factory.mktemp(kind)
        network.save_pretrained(folder)
        return folder

    return written


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_training_equals_that_on_the_dequantized_weights(
    model_folder: ModelFolder, dequantized: Dequantized, kind: Quantization
) -> None:
    engines = [
        Engine.load(str(model_folder(FAMILY)), quantization=kind),
        Engine.load(str(dequantized(kind))),
    ]
    for engine in engines:
        engine.run([op for cycle in range(2) for tenant in MIX for op in tenant.ops(cycle)])

    for tenant in MIX:
        ours, theirs = (each.adapters.state(tenant.run) for each in engines)
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("recompute", [variant("never"), "always"])
def test_a_run_among_others_equals_the_run_alone(model_folder: ModelFolder, recompute: Any) -> None:
    together, alone = (
        Engine.load(str(model_folder(FAMILY)), quantization="int8", recompute=choice) for choice in ("never", recompute)
    )
    for cycle in range(2):
        together.run([op for tenant in MIX for op in tenant.ops(cycle)])
        alone.run(MIX[0].ops(cycle))

    run = MIX[0].run
    assert same_bits(together.adapters.state(run), alone.adapters.state(run))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_logprobs_of_the_trainer(model_folder: ModelFolder, kind: Quantization) -> None:
    engine = Engine.load(str(model_folder(FAMILY)), quantization=kind)
    weights = trained_weights(engine)
    prompt = np.random.default_rng(3).integers(0, 128, 20)

    found = finish(decoder_of(engine, weights), [request("mine", prompt, "all-8")])["mine"]

    assert isinstance(found, SampleOutput)
    tokens = np.concatenate([prompt, found.sequences[0].tokens])
    (theirs,) = trainer_logprobs(engine, "all-8", tokens)
    np.testing.assert_allclose(found.sequences[0].logprobs, theirs[19:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "worst", "bits"),
    # int8: half a step of 127. fp8: half of 1/8 of a value. nf4: half of the largest distance of two levels.
    [("int8", 0.5 / 127, 8), ("fp8", 1 / 16, 8), ("nf4", 0.152, 4)],
)
def test_a_weight_keeps_its_values_within_a_step(kind: Quantization, worst: float, bits: int) -> None:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(0))
    weight[3] = 0

    quantized = QuantizedWeight(weight, kind)

    found = quantized.dense()
    assert torch.equal(found[3], torch.zeros(72))
    assert float((found - weight).abs().max() / weight.abs().max()) <= worst * 1.001
    assert quantized.codes.nbytes <= (weight.numel() + 64) * bits // 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_value_is_the_product_in_fp32_rounded_once(kind: Quantization, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)

    quantized = QuantizedWeight(weight, kind)

    assert torch.equal(quantized.dense(), (quantized.codes.float() * quantized.scales).to(dtype))


def test_no_dequantized_weight_is_kept_for_the_backward(model_folder: ModelFolder) -> None:
    engine = Engine.load(str(model_folder(FAMILY)), quantization="int8")
    shapes: set[tuple[int, ...]] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.run(MIX[0].ops(0))

    assert not shapes & {(target.outputs, target.inputs) for target in engine._base.targets[:-1]}


def test_the_numerics_and_the_parameters_count_it(model_folder: ModelFolder) -> None:
    plain, quantized = (Engine.load(str(model_folder(FAMILY)), quantization=kind).facts for kind in ("none", "nf4"))
    assert plain.numerics_id != quantized.numerics_id
    assert plain.numerics.differences(quantized.numerics) == ["quantization none, now nf4"]
    assert plain.num_parameters == quantized.num_parameters


def test_what_cannot_be_quantized_is_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="weights of experts are not quantized"):
        Engine.load(str(build_tiny("mixtral", tmp_path / "experts")), quantization="int8")
    network: Any = load_plain(model_folder(FAMILY), torch.float32)
    broken = network.model.layers[0].mlp.up_proj.weight.clone()
    broken[0, 0] = torch.nan
    network.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(broken)
    network.save_pretrained(tmp_path / "broken")
    with pytest.raises(NoModel, match="its weights are not finite"):
        Engine.load(str(tmp_path / "broken"), quantization="int8")
