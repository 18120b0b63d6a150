from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cotrain_workers.adam import Due, adamw_steps, gradient_norms, refuse_step
from cotrain_workers.bank import AdapterBank
from cotrain_workers.ops import OptimStep
from cotrain_workers.spec import AdapterSpec, Target

STEP = OptimStep("a", 1, 1e-2, 0.9, 0.95, 1e-12, 0.1, 0.0)
TARGETS = (Target("q_proj", "attn", 24, 16),)


def bank(dtype: torch.dtype = torch.float32) -> AdapterBank:
    return AdapterBank(TARGETS, torch.device("cpu"), dtype)


@pytest.mark.parametrize("clip", [0.0, -1.0, 0.5, 1e9])
def test_every_step_may_bring_its_own_parameters(clip: float) -> None:
    adapter = bank().create("a", AdapterSpec(4, seed=0))
    theirs = torch.nn.Parameter(adapter.weights.clone())
    optimizer = torch.optim.AdamW([theirs])
    for number in range(1, 11):
        op = replace(
            STEP, learning_rate=1e-2 / number, beta1=0.5 + number / 30, grad_clip_norm=clip
        )
        grad = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(number))
        adapter.gradient.flat.copy_(grad)
        theirs.grad = grad.clone()

        (norm,) = gradient_norms([adapter])
        adamw_steps([Due(adapter, op, norm)])

        optimizer.param_groups[0].update(
            lr=op.learning_rate, betas=(op.beta1, op.beta2), eps=op.eps, weight_decay=0.1
        )
        if clip > 0:
            torch.nn.utils.clip_grad_norm_([theirs], clip)
        optimizer.step()
        assert norm == pytest.approx(float(grad.double().norm()))
        assert adapter.step == number
        assert not adapter.gradient.flat.any()
    torch.testing.assert_close(adapter.weights, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_the_compute_copy_follows_the_weights() -> None:
    adapter = bank(torch.bfloat16).create("a", AdapterSpec(4, seed=0))
    adapter.gradient.flat.fill_(1.0)

    (norm,) = gradient_norms([adapter])
    adamw_steps([Due(adapter, replace(STEP, learning_rate=0.1), norm)])

    assert adapter.weights.dtype == torch.float32
    views = adapter.layout.views(adapter.weights)["q_proj"]
    assert torch.equal(adapter.compute["q_proj"].b, views.b.bfloat16())
    assert torch.equal(adapter.compute["q_proj"].a, views.a.bfloat16())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("grad_clip_norm", math.nan),
    ],
)
def test_parameters_that_would_ruin_an_adapter_are_refused(name: str, value: float) -> None:
    changed: Any = {name: value}

    reason = refuse_step(replace(STEP, **changed))

    assert reason == f"Optimizer parameter {name}={value} is out of range."


def test_ordinary_parameters_are_accepted() -> None:
    assert refuse_step(STEP) is None
    assert refuse_step(replace(STEP, learning_rate=0.0, grad_clip_norm=-1.0)) is None
