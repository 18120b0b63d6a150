"""The functions that are compiled on CUDA: what transformers computes, and where they are put."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from cotrain_workers import fusion
from cotrain_workers.compiled import difference, is_right
from cotrain_workers.fusion import fuse, gelu_gate, norm_then_weight, silu_gate
from cotrain_workers.ops import PassOutput
from tests.support.tiny_models import FAMILIES
from tests.support.training import MIX, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_workers.engine import Engine

    NewEngine = Callable[..., Engine]


class Uncompiled:
    """Stands for the compiler: counts what it was given and how often that ran."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, function: Any, dims: Sequence[int], examples: Sequence[Any]) -> Any:
        assert all(examples[at].shape[dim] == fusion.ROWS for at, dim in enumerate(dims))
        self.calls.setdefault(function.__name__, 0)

        def run(*args: Any) -> Any:
            self.calls[function.__name__] += 1
            return function(*args)

        return run


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_norms_gates_and_rotations_and_keeps_its_bits(
    new_engine: NewEngine, family: str
) -> None:
    plain, fused = new_engine(family), new_engine(family, recompute="always")
    compiler = Uncompiled()

    assert fuse(fused._base.backbone, fused._base.router, compiler) == ("gate", "norm", "rope")

    assert len(compiler.calls) == 3
    ops = [op for tenant in MIX for op in tenant.ops(0)]
    for engine in (plain, fused):
        outputs = engine.run(ops).outputs
        assert any(isinstance(each, PassOutput) for each in outputs.values())
    assert all(count > 0 for count in compiler.calls.values())
    for tenant in MIX:
        assert same_bits(plain.state(tenant.run), fused.state(tenant.run)), tenant.run


def test_the_decoder_and_other_models_keep_what_they_had(new_engine: NewEngine) -> None:
    fused, other = new_engine(), new_engine()
    compiler = Uncompiled()
    fuse(fused._base.backbone, fused._base.router, compiler)
    x, mlp = torch.randn(1, 8, 64), fused._base.backbone.get_submodule("layers.0.mlp")

    other.run(MIX[0].ops(0))
    with fused._base.router.use_step(_Step()):  # type: ignore[arg-type]
        mlp(x)

    assert set(compiler.calls.values()) == {0}


class _Step:
    def linear(self, module: str, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)


def test_a_model_that_computes_something_else_stays_as_it_is(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = new_engine()
    monkeypatch.setattr(fusion, "silu_gate", gelu_gate)

    assert fuse(engine._base.backbone, engine._base.router, Uncompiled()) == ("norm", "rope")
    assert "gate: 2 of 2 are not fused" in caplog.text


def test_what_cannot_be_compiled_stays_as_it_is(new_engine: NewEngine) -> None:
    engine = new_engine()
    before = engine._base.backbone.get_submodule("norm").forward

    assert fuse(engine._base.backbone, engine._base.router, lambda *_: None) == ()
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


def test_the_difference_of_a_function_to_itself_is_nothing() -> None:
    x, weight = torch.randn(1, 8, 16), torch.randn(16)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return norm_then_weight(x, weight, 1e-6)

    assert difference(norm, norm, x) == 0
    assert difference(norm, lambda x: 1.01 * norm(x), x) == pytest.approx(0.01, rel=0.05)
