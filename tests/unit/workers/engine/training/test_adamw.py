from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim.adamw import adamw
from torch.utils._python_dispatch import TorchDispatchMode

from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.ops import Failure, OptimStep, Output, StepOutput
from cotrain_workers.engine.spec import AdapterSpec, Target
from cotrain_workers.engine.training import adamw as adam
from cotrain_workers.engine.training.adamw import (
    Due,
    adamw_steps,
    clip,
    gradient_norms,
    largest_norm,
    refuse_step,
    take_steps,
)

STEP = OptimStep("a", 1, 1e-2, 0.9, 0.95, 1e-12, 0.1, 0.0)
TARGETS = (Target("q_proj", "attn", 24, 16),)


def bank(dtype: torch.dtype = torch.float32) -> AdapterBank:
    return AdapterBank(TARGETS, torch.device("cpu"), dtype)


@pytest.mark.parametrize("longest", [0.0, 0.5, 1e9])
def test_every_step_may_have_its_own_parameters(longest: float) -> None:
    adapter = bank().create("a", AdapterSpec(4, seed=0))
    theirs = torch.nn.Parameter(adapter.weights.clone())
    optimizer = torch.optim.AdamW([theirs])
    for number in range(1, 11):
        op = replace(STEP, learning_rate=1e-2 / number, beta1=0.5 + number / 30, grad_clip_norm=longest)
        grad = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(number))
        adapter.gradient.flat.copy_(grad)
        adapter.grads_pending = True
        theirs.grad = grad.clone()

        (norm,) = gradient_norms([adapter])
        adamw_steps([Due(adapter, op, norm)])

        optimizer.param_groups[0].update(lr=op.learning_rate, betas=(op.beta1, op.beta2), eps=op.eps, weight_decay=0.1)
        if longest > 0:
            torch.nn.utils.clip_grad_norm_([theirs], longest)
        optimizer.step()
        assert norm == pytest.approx(float(grad.double().norm()))
        assert adapter.step == number
        assert not adapter.gradient.flat.any()
        assert not adapter.grads_pending
    torch.testing.assert_close(adapter.weights, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_a_vanishing_gradient_is_clipped_as_in_torch() -> None:
    adapter = bank().create("a", AdapterSpec(4, seed=0))
    theirs = torch.nn.Parameter(adapter.weights.clone())
    theirs.grad = torch.full_like(theirs, 1e-8)
    adapter.gradient.flat.fill_(1e-8)

    (norm,) = gradient_norms([adapter])
    clip([Due(adapter, replace(STEP, grad_clip_norm=norm / 2), norm)])

    torch.nn.utils.clip_grad_norm_([theirs], norm / 2)
    torch.testing.assert_close(adapter.gradient.flat, theirs.grad, rtol=1e-5, atol=0.0)


def test_the_compute_copy_follows_the_weights() -> None:
    adapter = bank(torch.bfloat16).create("a", AdapterSpec(4, seed=0))
    before = adapter.compute["q_proj"].a.clone()
    adapter.gradient.flat.fill_(1.0)

    (norm,) = gradient_norms([adapter])
    adamw_steps([Due(adapter, replace(STEP, learning_rate=0.1), norm)])

    assert not torch.equal(adapter.compute["q_proj"].a, before)

    assert adapter.weights.dtype == torch.float32
    views = adapter.layout.views(adapter.weights)["q_proj"]
    assert torch.equal(adapter.compute["q_proj"].b, views.b.bfloat16())
    assert torch.equal(adapter.compute["q_proj"].a, views.a.bfloat16())


#: Two groups of equal parameters apart from clipping. Ranks, sizes and step counts differ.
GROUPS = (
    (STEP, 4, 0),
    (replace(STEP, grad_clip_norm=0.5), 8, 3),
    (replace(STEP, learning_rate=1e-3), 4, 7),
    (replace(STEP, grad_clip_norm=1e9), 5, 0),
    (replace(STEP, learning_rate=1e-3, grad_clip_norm=1e-3), 16, 1),
)


def due_steps(adapter_bank: AdapterBank, chosen: tuple[int, ...]) -> list[Due]:
    """Make adapters that have taken some steps and have a gradient. Return their due steps."""
    adapters = []
    for at in chosen:
        _, rank, taken = GROUPS[at]
        adapter = adapter_bank.create(f"run-{at}", AdapterSpec(rank, seed=at))
        adapter.step = taken
        for number, arena in enumerate((adapter.gradient.flat, adapter.m, adapter.v), 10 * at):
            arena.copy_(torch.rand(len(arena), generator=torch.Generator().manual_seed(number)))
        adapters.append(adapter)
    norms = gradient_norms(adapters)
    return [Due(adapter, GROUPS[at][0], norm) for at, adapter, norm in zip(chosen, adapters, norms, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_joint_steps_have_the_bits_of_single_steps(dtype: torch.dtype) -> None:
    together, one_by_one = bank(dtype), bank(dtype)
    every = tuple(range(len(GROUPS)))

    adamw_steps(due_steps(together, every))
    for at in every:
        adamw_steps(due_steps(one_by_one, (at,)))

    for at in every:
        ours, theirs = together.state(f"run-{at}"), one_by_one.state(f"run-{at}")
        assert ours.digest() == theirs.digest()
        assert ours.step == GROUPS[at][2] + 1


def test_there_is_one_launch_for_each_set_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []

    def counted(weights: list[torch.Tensor], *args: Any, **settings: Any) -> None:
        launches.append(len(weights))
        adamw(weights, *args, **settings)

    monkeypatch.setattr(adam, "adamw", counted)
    adapter_bank = bank()
    steps = due_steps(adapter_bank, tuple(range(len(GROUPS))))
    adamw_steps(steps)

    assert sorted(launches) == [2, 3]
    adamw_steps([])
    assert len(launches) == 2


class HostTransfers(TorchDispatchMode):
    """Counter of reads of a tensor's values by the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.count = 0

    def __torch_dispatch__(  # type: ignore[explicit-override]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_all_norms_are_copied_to_the_host_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_bank = bank()
    adapters = [due.adapter for due in due_steps(adapter_bank, (0, 1, 2))]
    read: list[tuple[int, ...]] = []
    plain = torch.Tensor.tolist

    def noted(self: torch.Tensor) -> Any:
        read.append(tuple(self.shape))
        return plain(self)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    with HostTransfers() as transfers:
        norms = gradient_norms(adapters)

    assert read == [(3,)]
    assert transfers.count == 0
    expected = [float(adapter.gradient.flat.double().norm()) for adapter in adapters]
    assert norms == pytest.approx(expected, rel=1e-14)
    assert gradient_norms([]) == []


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
        ("grad_clip_norm", -1.0),
    ],
)
def test_invalid_optimizer_parameters_are_refused(name: str, value: float) -> None:
    changed: Any = {name: value}

    reason = refuse_step(replace(STEP, **changed))

    assert reason == f"Optimizer parameter {name}={value} is out of range."


def test_ordinary_parameters_are_accepted() -> None:
    assert refuse_step(STEP) is None
    assert refuse_step(replace(STEP, learning_rate=0.0, grad_clip_norm=0.0)) is None


def stepped(adapter_bank: AdapterBank, *ops: OptimStep) -> dict[tuple[str, int], Output]:
    """Return the outputs of steps of runs whose gradients are set."""
    outputs: dict[tuple[str, int], Output] = {}
    take_steps({op.run: adapter_bank[op.run] for op in ops}, ops, outputs)
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("beta2", [0.0, 0.95, 0.999])
def test_the_largest_accepted_gradient_leaves_moments_finite(dtype: torch.dtype, beta2: float) -> None:
    adapter_bank = bank(dtype)
    adapter = adapter_bank.create("a", AdapterSpec(4, seed=0))
    for seq in range(1, 30):
        adapter.gradient.flat.zero_()[7] = largest_norm(adapter) * 0.999
        outputs = stepped(adapter_bank, replace(STEP, seq=seq, beta2=beta2))
        assert isinstance(outputs["a", seq], StepOutput)
    for arena in (adapter.weights, adapter.m, adapter.v):
        assert torch.isfinite(arena).all()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (2.0, "Gradient is too large for Adam (seq 1)"),
        (1e18, "so the limit is 9.22e+18"),
        (math.inf, "Gradient is not finite (seq 1)"),
    ],
)
def test_a_gradient_with_an_infinite_square_fails_alone(size: float, message: str) -> None:
    adapter_bank, alone = bank(), bank()
    for each in (adapter_bank, alone):
        each.create("bad", AdapterSpec(4, seed=0))
        each.create("good", AdapterSpec(8, seed=1))
        each["good"].gradient.flat.fill_(1e-3)
    bad = adapter_bank["bad"]
    before = adapter_bank.state("bad").digest()
    bad.gradient.flat[3] = largest_norm(bad) * size
    bad.grads_pending = True

    outputs = stepped(adapter_bank, replace(STEP, run="bad"), replace(STEP, run="good"))

    failure = outputs["bad", 1]
    assert isinstance(failure, Failure)
    assert (failure.category, failure.code) == ("user", "not_finite")
    assert message in failure.message
    assert not bad.grads_pending
    assert adapter_bank.state("bad").digest() == before
    stepped(alone, replace(STEP, run="good"))
    assert adapter_bank.state("good").digest() == alone.state("good").digest()
    weights = bad.weights.clone()
    bad.gradient.flat.fill_(1e-3)
    stepped(adapter_bank, replace(STEP, run="bad", seq=2))
    assert (bad.weights != weights).all()


def test_a_clipped_gradient_may_have_any_size() -> None:
    adapter_bank = bank()
    adapter = adapter_bank.create("a", AdapterSpec(4, seed=0))
    adapter.gradient.flat.fill_(1e30)
    outputs = stepped(adapter_bank, replace(STEP, grad_clip_norm=1.0))
    assert isinstance(outputs["a", 1], StepOutput)
    assert torch.isfinite(adapter.v).all()


@pytest.mark.parametrize(
    "parameters", [{"learning_rate": 1e30}, {"learning_rate": 1e38, "weight_decay": 1e38}, {"learning_rate": 3e38}]
)
def test_a_step_to_infinite_weights_leaves_the_run_unchanged(parameters: dict[str, float]) -> None:
    adapter_bank = bank()
    adapter = adapter_bank.create("a", AdapterSpec(4, seed=0))
    adapter.gradient.flat.fill_(1e-3)
    stepped(adapter_bank, STEP)
    before, version = adapter_bank.state("a").digest(), adapter.version
    adapter.gradient.flat.fill_(1e-3)
    adapter.grads_pending = True

    outputs = stepped(adapter_bank, replace(STEP, seq=2, **parameters))  # type: ignore[arg-type]

    failure = outputs["a", 2]
    assert isinstance(failure, Failure)
    assert "Step would make weights infinite or nearly so (seq 2, learning_rate=" in failure.message
    assert "Use a smaller learning_rate." in failure.message
    assert adapter_bank.state("a").digest() == before
    assert adapter.version > version


def test_a_large_learning_rate_with_finite_weights_is_accepted() -> None:
    adapter_bank = bank()
    adapter = adapter_bank.create("a", AdapterSpec(4, seed=0))
    adapter.gradient.flat.fill_(1e-3)
    outputs = stepped(adapter_bank, replace(STEP, learning_rate=1e15, weight_decay=0.0))
    assert isinstance(outputs["a", 1], StepOutput)
    assert torch.isfinite(adapter.weights).all()
