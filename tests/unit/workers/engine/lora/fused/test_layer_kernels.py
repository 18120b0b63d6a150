"""Decoder layers with kernels, with gates and residual additions inside the products, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding import model_runner
from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora import backend
from cotrain_workers.engine.lora.fused.operators import GELU, SILU
from cotrain_workers.engine.model import fused_layers
from cotrain_workers.engine.model.fused_layers import (
    fuse_layers,
    gelu_gate,
    norm_then_weight,
    norm_with_one,
    rotate,
    silu_gate,
)
from cotrain_workers.engine.model.layer_kernels import KeptNorm, RotatedNorm
from cotrain_workers.engine.ops import PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.decoding import finish, request, trained_weights
from tests.support.lora_problem import needs_kernels
from tests.support.tiny_models import FAMILIES, build_tiny
from tests.support.training import Tenant, relative_error, same_bits

Load = Callable[..., Engine]

pytestmark = needs_kernels

OWN = Tenant("all-8", AdapterSpec(8, seed=5), "cross_entropy", (2, 21))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a loader of a tiny model. The self-check has its own tests, and is off here."""
    monkeypatch.setattr(backend, "disagreement", lambda *_, **__: None)

    def loaded(family: str, lora: str, **rest: Any) -> Engine:
        folder = tmp_path / family
        if not folder.exists():
            build_tiny(family, folder, layers=2 if family == "gemma3" else 1)
        return Engine.load(str(folder), dtype=torch.float32, lora_backend=lora, **rest)  # type: ignore[arg-type]

    return loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_results_of_seg(load: Load, family: str) -> None:
    seg, fused = load(family, "seg"), load(family, "fused")
    # In the layers of Gemma 2 and 3, norms are between the products and the additions.
    wanted = {"norms", "heads", "mlp", "softmax"}
    wanted |= set() if family in ("gemma2", "gemma3") else {"residuals"}
    assert set(fused.facts.numerics.fused.split()) == wanted
    seg.run(OWN.ops(0))  # afterwards B is not zero
    fused.adapters.restore(OWN.run, seg.adapters.state(OWN.run))

    passes = [op for op in OWN.ops(1) if getattr(op, "needs_grad", False)]
    assert passes
    expected, found = (each.run(passes).outputs for each in (seg, fused))

    for key, theirs in expected.items():
        ours = found[key]
        assert isinstance(theirs, PassOutput)
        assert isinstance(ours, PassOutput)
        for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(own, other, atol=2e-5)
    gradients = [each.adapters.state(OWN.run).grads for each in (fused, seg)]
    assert relative_error(*gradients) < 1e-5


def test_recomputing_a_layer_changes_no_bit(load: Load) -> None:
    once, twice = (load("llama", "fused", recompute=each) for each in ("never", "always"))

    for each in (once, twice):
        each.run(OWN.ops(0))

    assert same_bits(once.adapters.state(OWN.run), twice.adapters.state(OWN.run))


@pytest.mark.parametrize(
    ("family", "by_kernels"), [("qwen3", False), ("qwen3", True), ("llama", False), ("gemma2", False)]
)
def test_the_decoder_gets_the_results_of_plain_layers(
    load: Load, monkeypatch: pytest.MonkeyPatch, family: str, *, by_kernels: bool
) -> None:
    weights, found = trained_weights(load(family, "seg")), []
    for lora in ("seg", "fused"):
        engine = load(family, lora)
        if lora == "fused":  # on CUDA kernels also add LoRA and residuals
            monkeypatch.setattr(model_runner, "lora_kernel_takes", lambda _: by_kernels)
        decoder = engine.decoder(weights.__getitem__, kv_tokens=2048, text=None)
        mine = request("mine", np.arange(20), "all-8", max_tokens=4)
        output = finish(decoder, [mine])["mine"]
        assert isinstance(output, SampleOutput)
        found.append(output.sequences[0])

    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=2e-5)


def test_a_layer_with_other_functions_is_not_changed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "silu_gate", lambda gate, up: gate * up)
    engine = load("llama", "seg")
    layer: Any = engine._base.backbone.get_submodule("layers.0")
    before = layer.forward, layer.mlp.forward

    assert fuse_layers(engine._base, in_products=True) == ("norms", "heads")
    assert (layer.forward, layer.mlp.forward) == before


def kept_norm(x: torch.Tensor, weight: torch.Tensor, pure: Any = norm_then_weight) -> Any:
    return KeptNorm.apply(x, weight, 1e-6, pure is norm_with_one)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("pure", [norm_then_weight, norm_with_one, None])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rotated_norms_and_their_gradients_equal_those_of_two_ops(dtype: torch.dtype, most: float, pure: Any) -> None:
    x, weight, cos, sin, slope = heads(dtype)

    def two_ops(x: torch.Tensor) -> torch.Tensor:
        q = (pure(x, weight, 1e-6) if pure else x).transpose(0, 1)[None]
        return rotate(q, q, cos[None], sin[None])[0][0].transpose(0, 1)

    expected, found = (
        turned_and_gradient(each, x, slope) for each in (two_ops, partial(rotated, pure, weight, cos, sin))
    )

    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= most


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("pure", [norm_then_weight, None])
def test_a_row_of_a_rotated_norm_has_the_same_bits_alone(pure: Any) -> None:
    x, weight, cos, sin, slope = heads(torch.float32)
    norm = partial(rotated, pure, weight)
    alone = turned_and_gradient(partial(norm, cos[2:3], sin[2:3]), x[2:3], slope[2:3])
    for each in (x, slope):
        each[1], each[3] = torch.nan, torch.inf

    found = turned_and_gradient(partial(norm, cos, sin), x, slope)

    assert all(torch.equal(ours[2:3], theirs) for ours, theirs in zip(found, alone, strict=True))
    assert found[1][1].isnan().all()


def rotated(pure: Any, weight: Any, cos: Any, sin: Any, x: torch.Tensor) -> Any:
    weight = weight if pure else None
    return RotatedNorm.apply(x, weight, cos, sin, 1e-6, pure is norm_with_one)  # type: ignore[no-untyped-call]


def heads(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return five rows of three heads of size 24, a weight, the rotation angles, and the output gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3, 24), (24,), (5, 24), (5, 24), (5, 3, 24)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def turned_and_gradient(norm: Any, x: torch.Tensor, slope: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    return [y.detach(), *torch.autograd.grad(y, leaf, slope)]


def problem(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return `x`, a weight, and the gradients of the norm and of the kept tensor."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 72), (72,), (5, 72), (5, 72)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def through(norm: Any, x: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
    """Return the norm, the kept tensor, and the gradient of `x`."""
    leaf = x.clone().requires_grad_()
    y, kept = norm(leaf, rest[0])
    (gx,) = torch.autograd.grad((y, kept), leaf, rest[1:])
    return [y.detach(), kept.detach(), gx]


@pytest.mark.parametrize("pure", [norm_then_weight, norm_with_one])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_a_kept_norm_and_its_gradient_equal_those_of_two_ops(dtype: torch.dtype, most: float, pure: Any) -> None:
    given = problem(dtype)

    expected = through(lambda x, weight: (pure(x, weight, 1e-6), x * 1), *given)
    found = through(partial(kept_norm, pure=pure), *given)

    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= most


@pytest.mark.parametrize("pure", [norm_then_weight, norm_with_one])
def test_a_norm_without_a_kept_tensor_has_the_plain_gradient(pure: Any) -> None:
    x, weight, slope, _ = problem(torch.float32)

    found, expected = (
        turned_and_gradient(each, x, slope)
        for each in (lambda x: kept_norm(x, weight, pure)[0], lambda x: pure(x, weight, 1e-6))
    )

    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 2e-6


@pytest.mark.parametrize(("kind", "pure"), [(SILU, silu_gate), (GELU, gelu_gate)])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_a_gated_product_equals_that_of_two_ops(dtype: torch.dtype, most: float, kind: int, pure: Any) -> None:
    both = torch.randn(2, 5, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = pure(*both)

    ours = torch.ops.cotrain.gated(*both, kind)

    assert float((ours - expected).abs().max() / expected.abs().max()) <= most
    assert torch.equal(ours[3], torch.ops.cotrain.gated(*both[:, 3], kind))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_a_kept_norm_has_the_same_bits_alone() -> None:
    x, weight, *slopes = problem(torch.float32)
    alone = through(kept_norm, x[2:3], weight, *(each[2:3] for each in slopes))
    for each in (x, *slopes):
        each[1], each[3] = torch.nan, torch.inf

    found = through(kept_norm, x, weight, *slopes)

    assert all(torch.equal(ours[2:3], theirs) for ours, theirs in zip(found, alone, strict=True))
    assert found[2][1].isnan().all()
