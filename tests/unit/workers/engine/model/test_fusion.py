"""The functions that are compiled on CUDA: what transformers computes, and where they are put."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.decoding.requests import SampleOutput
from cotrain_workers.engine.model import fusion
from cotrain_workers.engine.model.compile import compiled, difference, is_right, kernel_of, variant
from cotrain_workers.engine.model.fusion import fuse, gelu_gate, norm_then_weight, silu_gate
from cotrain_workers.engine.ops import OptimStep, PassOutput
from tests.support.decoding import finish, request, trained_weights
from tests.support.tiny_models import FAMILIES
from tests.support.training import MIX, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_workers.engine.decoding.requests import SampledSequence
    from cotrain_workers.engine.engine import Engine

    NewEngine = Callable[..., Engine]


class Uncompiled:
    """Stands for the compiler: counts what it was given and how often that ran."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(
        self, function: Any, dims: Sequence[int], examples: Sequence[Any], *, gradients: int
    ) -> Any:
        assert all(examples[at].shape[dim] == fusion.ROWS for at, dim in enumerate(dims))
        self.calls.setdefault(function.__name__, 0)

        def run(*args: Any) -> Any:
            self.calls[function.__name__] += 1
            return function(*args)

        return run


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_norms_gates_and_rotations(new_engine: NewEngine, family: str) -> None:
    plain, fused = new_engine(family), new_engine(family, recompute="always")
    compiler = Uncompiled()

    assert fuse(fused._base.backbone, compiler) == ("gate", "norm", "rope")

    assert len(compiler.calls) == 3
    ops = [op for tenant in MIX for op in tenant.ops(0) if not isinstance(op, OptimStep)]
    ours, theirs = (engine.run(ops).outputs for engine in (fused, plain))
    assert all(count > 0 for count in compiler.calls.values())
    for key, output in ours.items():
        other = theirs[key]
        if isinstance(output, PassOutput):
            assert isinstance(other, PassOutput)
            assert all(map(np.array_equal, output.logprobs, other.logprobs))
    for tenant in MIX:  # fp32; the three gradients of a residual are added in another order
        grads = [engine.adapters.state(tenant.run).grads for engine in (fused, plain)]
        assert relative_error(*grads) < 1e-6, tenant.run


def test_the_decoder_uses_them(new_engine: NewEngine) -> None:
    engine = new_engine()
    weights = trained_weights(engine)
    mine = request("mine", np.arange(20), "all-8", max_tokens=8)

    def sampled() -> SampledSequence:
        decoder = engine.decoder(weights.__getitem__, kv_tokens=2048, text=None)
        found = finish(decoder, [mine])["mine"]
        assert isinstance(found, SampleOutput)
        return found.sequences[0]

    expected, compiler = sampled(), Uncompiled()
    fuse(engine._base.backbone, compiler)
    found = sampled()

    assert all(count > 0 for count in compiler.calls.values())
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_other_models_keep_what_they_had(new_engine: NewEngine) -> None:
    fused, other = new_engine(), new_engine()
    compiler = Uncompiled()
    fuse(fused._base.backbone, compiler)

    other.run(MIX[0].ops(0))

    assert set(compiler.calls.values()) == {0}


def test_a_model_that_computes_something_else_stays_as_it_is(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine()
    monkeypatch.setattr(fusion, "silu_gate", gelu_gate)

    assert fuse(engine._base.backbone, Uncompiled()) == ("norm", "rope")
    assert "gate: 2 of 2 are not fused" in caplog.text


def test_what_cannot_be_compiled_stays_as_it_is(new_engine: NewEngine) -> None:
    engine = new_engine()
    before = engine._base.backbone.get_submodule("norm").forward

    assert fuse(engine._base.backbone, lambda *_, **__: None) == ()
    assert engine._base.backbone.get_submodule("norm").forward == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_used_if_it_and_its_gradients_are_right(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    both = torch.randn(2, 1, 64, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    examples = list(both.unbind())

    def rounds_elsewhere(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return silu_gate(gate.float(), up.float()).to(dtype)

    def wrong_backward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return silu_gate(gate, up.detach()) + 0 * up

    def fails(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler here")

    assert is_right(rounds_elsewhere, silu_gate, 2, examples)
    assert not caplog.records
    assert not is_right(wrong_backward, silu_gate, 2, examples)
    assert "silu_gate is not fused: it would be off by" in caplog.text
    assert not is_right(fails, silu_gate, 2, examples)
    assert "no compiler here" in caplog.text


def test_a_kernel_is_checked_with_gradients_of_what_trains_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted: list[tuple[bool, ...]] = []

    def turn(*tensors: torch.Tensor) -> Any:
        wanted.append(tuple(tensor.requires_grad for tensor in tensors))
        return fusion.rotate(*tensors)

    monkeypatch.setattr("cotrain_workers.engine.model.compile.kernel_of", lambda *_: turn)
    inputs = (torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16), *torch.randn(2, 1, 8, 16))

    assert compiled(fusion.rotate, (2, 2, 1, 1), inputs, gradients=2)
    assert wanted == [(True, True, False, False), (False,) * 4]  # the second as the decoder does


def test_the_difference_of_a_function_to_itself_is_nothing() -> None:
    x, weight = torch.randn(1, 8, 16), torch.randn(16)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return norm_then_weight(x, weight, 1e-6)

    assert difference(norm, norm, x) == 0
    assert difference(norm, lambda x: 1.01 * norm(x), x) == pytest.approx(0.01, rel=0.05)


def test_a_kernel_is_named_after_what_it_is_compiled_for_and_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def compile_(function: Any, **settings: Any) -> Any:
        made.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    x, weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.ones(16)
    names = [variant((0,), (each, weight, 1e-6)) for each in (x, x[:4], x[:, :8], x.bfloat16())]
    assert names == ["float32_T_16", "float32_T_16", "float32_T_8", "bfloat16_T_16"]

    kernels = [kernel_of(norm_then_weight, ("test",), name) for name in names]

    assert len(made) == len({each.__code__ for each in made}) == 3
    assert kernels[0] is kernels[1]
    assert torch.equal(kernels[0](x, weight, 1e-6), norm_then_weight(x, weight, 1e-6))
    kernel_of.cache_clear()
