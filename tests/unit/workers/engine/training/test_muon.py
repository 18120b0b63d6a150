"""Muon against its rule in float64 numpy and `torch.optim.Muon`, among runs with AdamW, and through a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cotrain_workers.engine.adapters.adapter import Adapter
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Failure, Load, Op, OptimStep, Pass, Save, SaveOutput, StepOutput
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.engine.training.adamw import orthogonalized
from tests.support.training import NewEngine, random_datum, same_bits

MUON = AdapterSpec(4, 3, optimizer="muon")


def step(run: str, seq: int, kind: str = "muon", rate: float = 1e-2) -> OptimStep:
    return OptimStep(run, seq, rate, 0.95, 0.0, 1e-7, 0.1, 0.0, kind)


def passed(run: str, seq: int, seed: int = 0) -> Pass:
    rng = np.random.default_rng([seed, seq])
    return Pass(run, seq, [random_datum(rng, "cross_entropy", 9)], "cross_entropy", {}, needs_grad=True)


def trained(engine: Engine, run: str = "m", steps: int = 2, first: int = 1) -> None:
    for at in range(steps):
        engine.run([passed(run, first + 2 * at), step(run, first + 2 * at + 1)])


def newton_schulz(g: np.ndarray) -> np.ndarray:
    x: np.ndarray = g / max(np.linalg.norm(g), 1e-7)
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def matrices(adapter: Adapter, arena: torch.Tensor) -> list[np.ndarray]:
    pairs = adapter.layout.views(arena.clone()).values()
    return [each.double().numpy() for pair in pairs for each in (pair.a, pair.b)]


def test_two_steps_equal_the_rule_in_float64(new_engine: NewEngine) -> None:
    """Tolerance: 1e-6 in float32, for weights of about 0.1."""
    engine = new_engine()
    engine.run([Create("m", 0, MUON)])
    adapter = engine.adapters["m"]
    weights = matrices(adapter, adapter.weights)
    momentum = [np.zeros_like(each) for each in weights]
    for seq in (1, 3):
        engine.run([passed("m", seq)])
        gradients = matrices(adapter, adapter.gradient.flat)
        output = engine.run([step("m", seq + 1)]).outputs["m", seq + 1]
        assert isinstance(output, StepOutput)
        for at, gradient in enumerate(gradients):
            momentum[at] = 0.95 * momentum[at] + 0.05 * gradient
            direction = newton_schulz(0.05 * gradient + 0.95 * momentum[at])
            rate = 1e-2 * 0.2 * max(gradient.shape) ** 0.5
            weights[at] = weights[at] * (1 - 1e-2 * 0.1) - rate * direction
    for ours, expected in zip(matrices(adapter, adapter.weights), weights, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert adapter.step == 2


@pytest.mark.parametrize("shape", [(4, 64), (64, 4)])
def test_a_step_agrees_with_torch_within_its_bfloat16(shape: tuple[int, int]) -> None:
    """Torch orthogonalizes in bfloat16, with 8 bits of precision: 3 % of the step."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator)
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient.clone()
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    ours = -0.2 * max(shape) ** 0.5 * orthogonalized(gradient[None])[0]
    assert (parameter.detach() - ours).norm() < 0.03 * ours.norm()


def test_zeros_stay_zeros() -> None:
    assert not orthogonalized(torch.zeros(2, 3, 8)).any()


def test_both_optimizers_in_one_cycle_are_each_as_if_alone(new_engine: NewEngine) -> None:
    together, alone = new_engine(), new_engine()
    ops: list[Op] = [Create("m", 0, MUON), Create("a", 0, replace(MUON, optimizer="adamw"))]
    ops += [passed("m", 1), passed("a", 1), step("a", 2, "adamw"), step("m", 2)]
    together.run(ops)
    for run in ("m", "a"):
        alone.run([op for op in ops if op.run == run])
        assert same_bits(together.adapters.state(run), alone.adapters.state(run))
    assert not torch.equal(together.adapters["m"].weights, together.adapters["a"].weights)


def test_a_step_of_the_other_optimizer_fails_and_keeps_the_gradient(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("m", 0, MUON), passed("m", 1)])
    failed = engine.run([step("m", 2, "adamw")]).outputs["m", 2]
    assert isinstance(failed, Failure)
    assert "created with optimizer muon, not adamw: send optimizer_params" in failed.message
    assert engine.adapters["m"].grads_pending


def test_a_checkpoint_continues_with_its_momentum_and_refuses_another_optimizer(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([Create("m", 0, MUON)])
    trained(engine)
    saved = engine.run([Save("m", 5, optimizer=True)]).outputs["m", 5]
    assert isinstance(saved, SaveOutput)
    assert saved.optimizer is not None
    assert AdapterSpec(**saved.optimizer.spec.stored()) == MUON
    assert "optimizer" not in replace(MUON, optimizer="adamw").stored()

    copy = Load("c", 0, "x", saved.weights, saved.optimizer, creates=True, optimizer_type="muon")
    engine.run([copy, Create("a", 0, replace(MUON, optimizer="adamw"))])
    trained(engine, "c", steps=1, first=6)
    trained(engine, "m", steps=1, first=6)
    assert same_bits(engine.adapters.state("c"), engine.adapters.state("m"))
    refused = engine.run([Load("a", 1, "x", saved.weights, saved.optimizer)]).outputs["a", 1]
    assert isinstance(refused, Failure)
    assert "optimizer state of muon; this run has adamw" in refused.message
