"""The whole engine with the backend `fused`, in Triton's interpreter, compared with `seg`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora import backend
from cotrain_workers.engine.ops import OptimStep, PassOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.engine_checks import gradient_passes
from tests.support.lora_problem import needs_kernels
from tests.support.tiny_models import build_tiny
from tests.support.training import Tenant, relative_error, same_bits

pytestmark = needs_kernels

TENANTS = (
    Tenant("all-20", AdapterSpec(20, seed=5), "importance_sampling", (2, 30)),
    Tenant("mlp-4", AdapterSpec(4, 3, train_attn=False, alpha=4.0), "gspo", (5, 12, 2)),
)


def engine(folder: Path, lora: backend.BackendChoice) -> Engine:
    return Engine.load(str(folder), dtype=torch.float32, lora_backend=lora)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The self-check takes as long as a test here, and has its own tests.
    monkeypatch.setattr(backend, "disagreement", lambda *_, **__: None)
    return build_tiny("qwen3", tmp_path, layers=1)


def test_passes_and_a_step_equal_those_of_seg(folder: Path) -> None:
    seg, fused = engine(folder, "seg"), engine(folder, "fused")
    assert fused.facts.numerics.lora == "fused"
    seg.run([op for tenant in TENANTS for op in tenant.ops(0)])  # afterwards no B is zero
    for tenant in TENANTS:
        fused.adapters.restore(tenant.run, seg.adapters.state(tenant.run))

    passes = gradient_passes(TENANTS)
    expected, found = (each.run(passes).outputs for each in (seg, fused))
    for op in passes:
        theirs, ours = expected[op.run, op.seq], found[op.run, op.seq]
        assert isinstance(theirs, PassOutput)
        assert isinstance(ours, PassOutput)
        assert abs(ours.loss_sum - theirs.loss_sum) < 1e-5 * max(1.0, abs(theirs.loss_sum))
    known = {}
    for tenant in TENANTS:
        gradients = [each.adapters.state(tenant.run).grads for each in (fused, seg)]
        assert relative_error(*gradients) < 1e-5  # an error of 1e-7 grows through the layers
        size = gradients[1].abs() / gradients[1].abs().max()
        known[tenant.run] = size > 1e-6  # the others are lost in rounding: Adam divides them by their own size
        assert known[tenant.run].float().mean() > 0.999

    steps = [op for tenant in TENANTS for op in tenant.ops(1) if isinstance(op, OptimStep)]
    for each in (seg, fused):
        each.run(steps)
    for tenant in TENANTS:
        weights = [each.adapters.state(tenant.run).weights for each in (fused, seg)]
        assert relative_error(*(each[known[tenant.run]] for each in weights)) < 1e-5
        assert relative_error(*weights) < 1e-3


def test_a_run_among_others_equals_the_run_alone_exactly(folder: Path) -> None:
    together, alone = engine(folder, "fused"), engine(folder, "fused")
    together.run([op for tenant in TENANTS for op in tenant.ops(0)])

    alone.run(TENANTS[1].ops(0))

    run = TENANTS[1].run
    assert same_bits(together.adapters.state(run), alone.adapters.state(run))
