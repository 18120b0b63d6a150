"""Insertion of kernels into a base model, with plain functions in place of the kernels, so without Triton."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.requests import SampledSequence, SampleOutput
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.fused.operators import GELU
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
from cotrain_workers.engine.ops import OptimStep, Pass
from tests.support.decoding import finish, request, trained_weights
from tests.support.families import first_of_a_kind
from tests.support.open_passes import assert_same_outputs
from tests.support.tiny_models import FAMILIES, MORE
from tests.support.training import MIX, NewEngine, relative_error

ALL = ("norms", "heads", "mlp")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Replace the kernels by plain functions. Return how often each ran."""
    counted: Counter[str] = Counter()

    def pure_norm(x: Any, weight: Any, eps: float, one: bool) -> Any:
        return (norm_with_one if one else norm_then_weight)(x, weight, eps)

    def kept(x: Any, weight: Any, eps: float, one: bool) -> Any:
        counted["norm"] += 1
        return pure_norm(x, weight, eps, one), x.view_as(x)

    def turned(x: Any, weight: Any, cos: Any, sin: Any, eps: float, one: bool) -> Any:
        counted["turn"] += 1
        heads = (x if weight is None else pure_norm(x, weight, eps, one)).transpose(0, 1)[None]
        return rotate(heads, heads, cos[None], sin[None])[0][0].transpose(0, 1)

    def gated(gate: Any, up: Any, kind: int) -> Any:
        counted["gate"] += 1
        return (gelu_gate if kind == GELU else silu_gate)(gate, up)

    monkeypatch.setattr(fused_layers, "missing_kernels", lambda _: None)
    monkeypatch.setattr(KeptNorm, "apply", kept)
    monkeypatch.setattr(RotatedNorm, "apply", turned)
    monkeypatch.setattr(torch.ops.cotrain, "gated", gated)
    return counted


def fuse(engine: Engine) -> tuple[str, ...]:
    return fuse_layers(engine._base, in_products=False)


@pytest.mark.parametrize("family", first_of_a_kind(FAMILIES))
def test_every_family_has_kernels_for_its_norms_and_rotations(
    new_engine: NewEngine, ran: Counter[str], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fused = new_engine(family), new_engine(family, recompute="always")

    assert fuse(fused) == ALL
    assert not caplog.records
    ran.clear()

    ops = [op for tenant in MIX for op in tenant.ops(0) if not isinstance(op, OptimStep)]
    ours, theirs = (engine.run(ops).outputs for engine in (fused, plain))
    assert ran["norm"] > 0
    assert ran["turn"] > 0
    assert ran["gate"] == 0  # as transformers computes it, or inside products
    assert_same_outputs(dict(ours), dict(theirs))
    for tenant in MIX:  # fp32; the three gradients of a residual are added in another order
        grads = [engine.adapters.state(tenant.run).grads for engine in (fused, plain)]
        assert relative_error(*grads) < 1e-6, tenant.run


@pytest.mark.parametrize("family", first_of_a_kind(MORE))
def test_kernels_change_no_result_of_other_families(new_engine: NewEngine, ran: Counter[str], family: str) -> None:
    plain, fused = new_engine(family), new_engine(family)
    fuse(fused)

    create, trained, *_ = MIX[0].ops(0)
    assert isinstance(trained, Pass)
    ops = [create, replace(trained, needs_grad=False)]
    ours, theirs = (engine.run(ops).outputs for engine in (fused, plain))

    assert_same_outputs(dict(ours), dict(theirs))


def test_the_decoder_uses_the_kernels(new_engine: NewEngine, ran: Counter[str]) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine = request("mine", np.arange(20), "all-8", max_tokens=8)

    def sampled() -> SampledSequence:
        decoder = engine.decoder(weights.__getitem__, kv_tokens=2048, text=None)
        found = finish(decoder, [mine])["mine"]
        assert isinstance(found, SampleOutput)
        return found.sequences[0]

    expected = sampled()
    fuse(engine)
    ran.clear()
    found = sampled()

    assert set(ran) == {"norm", "turn", "gate"}
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_other_models_are_not_changed(new_engine: NewEngine, ran: Counter[str]) -> None:
    fused, other = new_engine(), new_engine()
    fuse(fused)
    ran.clear()

    other.run(MIX[0].ops(0))

    assert not ran


@pytest.mark.parametrize(
    ("function", "wrong", "left", "said"),
    [
        ("silu_gate", gelu_gate, ("norms", "heads"), "mlp: 2 of 2 are as transformers has them"),
        ("rotate", lambda q, k, *_: (q, k), ("norms", "mlp"), "heads: 2 of 2 are"),
        ("norm_then_weight", norm_with_one, ("mlp",), "norms: 9 of 9 are"),
    ],
)
def test_a_model_with_other_functions_is_not_changed(
    new_engine: NewEngine,
    ran: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
    wrong: Any,
    left: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(fused_layers, function, wrong)

    assert fuse(new_engine()) == left
    assert said in caplog.text


def test_a_kernel_with_wrong_results_is_not_used(
    new_engine: NewEngine, ran: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine()
    before = engine._base.backbone.get_submodule("norm").forward
    right = KeptNorm.apply

    def off(*given: Any) -> Any:
        y, kept = right(*given)  # type: ignore[no-untyped-call]
        return 1.01 * y, kept

    monkeypatch.setattr(KeptNorm, "apply", off)

    assert fuse(engine) == ("heads", "mlp")
    assert engine._base.backbone.get_submodule("norm").forward == before
    assert "norms: 9 of 9 are as transformers has them" in caplog.text
    assert caplog.text.count("and is not used") == 2  # norms of two sizes


def test_without_triton_the_model_is_unchanged_and_a_warning_is_logged(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused_layers, "missing_kernels", lambda _: "triton is not installed")

    with caplog.at_level(logging.WARNING):
        assert fuse(new_engine()) == ()
    assert "slower: triton is not installed" in caplog.text


def test_a_model_sharded_among_processes_is_not_changed(
    new_engine: NewEngine, ran: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    shared = replace(new_engine()._base, lock_step=SimpleNamespace(sharding="fsdp2/2"))

    assert fuse_layers(shared, in_products=True) == ()
    assert "slower: its weights are shared among processes" in caplog.text
    assert not ran
