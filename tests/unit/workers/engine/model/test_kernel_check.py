"""Kernels, which are used only after a comparison of their results and gradients with those of a plain function."""

from __future__ import annotations

import pytest
import torch

from cotrain_workers.engine.model.fused_layers import norm_then_weight, silu_gate
from cotrain_workers.engine.model.kernel_check import difference, is_right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_used_if_it_and_its_gradients_are_correct(
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
    assert "The kernel of silu_gate is off by" in caplog.text
    assert not is_right(fails, silu_gate, 2, examples)
    assert "no compiler here" in caplog.text


def test_a_kernel_without_gradients_is_compared_forward() -> None:
    both = list(torch.randn(2, 1, 64, 96, generator=torch.Generator().manual_seed(0)))

    def without_backward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return silu_gate(gate.detach(), up.detach())

    assert is_right(without_backward, silu_gate, 0, both)
    assert not is_right(without_backward, silu_gate, 2, both)
    assert not is_right(lambda gate, up: 1.01 * silu_gate(gate, up), silu_gate, 0, both)


def test_the_difference_of_a_function_to_itself_is_zero() -> None:
    x, weight = torch.randn(1, 8, 16), torch.randn(16)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return norm_then_weight(x, weight, 1e-6)

    assert difference(norm, norm, x) == 0
    assert difference(norm, lambda x: 1.01 * norm(x), x) == pytest.approx(0.01, rel=0.05)
