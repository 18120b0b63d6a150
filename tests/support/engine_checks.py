"""Guarantees of the engine, measured on any device: CPU in the unit tests, CUDA if there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.lora.backend import BackendChoice
from cotrain_workers.engine.model.base_model import load_base_model
from cotrain_workers.engine.ops import Pass, PassOutput
from cotrain_workers.engine.training.losses import LOSSES
from tests.support.shared_base import shared_base
from tests.support.training import MIX, PeftOracle, Tenant, relative_error, same_bits


@dataclass(frozen=True)
class Parity:
    """Errors of the mixed cycle relative to plain PEFT, each the maximum of all tenants."""

    logprob_error: float  # absolute
    gradient_error: float  # relative to the largest gradient
    loss_error: float  # relative to the sum of absolute terms if that is above 1


@dataclass(frozen=True)
class Alone:
    """Differences between tenants in mixed cycles and each of them alone."""

    is_bit_equal: bool
    gradient_error: float  # relative to the largest value, from equal states


def engine_of(folder: Path, device: str, dtype: torch.dtype | None, lora: BackendChoice) -> Engine:
    """Return a fresh engine. On a CPU, all engines share one copy of the base model."""
    load_base = shared_base if device == "cpu" else load_base_model
    return Engine.load(str(folder), device=device, dtype=dtype, lora_backend=lora, load_base=load_base)


def warmed_up(folder: Path, device: str, dtype: torch.dtype | None, lora: BackendChoice = "auto") -> Engine:
    """Return an engine whose tenants have taken one step, so that no B is zero."""
    engine = engine_of(folder, device, dtype, lora)
    engine.run([op for tenant in MIX for op in tenant.ops(0)])
    return engine


def gradient_passes(tenants: Sequence[Tenant] = MIX) -> list[Pass]:
    """Return the passes of the second cycle, without its steps."""
    return [op for tenant in tenants for op in tenant.ops(1) if isinstance(op, Pass)]


def unclipped(op: Pass) -> Pass:
    """Return a pass whose loss bounds no ratio."""
    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": math.inf}
    known = LOSSES[op.loss_fn].defaults
    return replace(op, loss_config={name: bounds[name] for name in bounds if name in known})


def parity_with_peft(folder: Path, device: str, dtype: torch.dtype, lora: BackendChoice = "auto") -> Parity:
    """Run one mixed cycle, then the same passes in PEFT, one tenant and one sequence at a time."""
    engine = warmed_up(folder, device, dtype, lora)
    before = {tenant.run: engine.adapters.state(tenant.run).weights for tenant in MIX}
    mixed = engine.run(gradient_passes()).outputs
    logprob_errors, gradient_errors, loss_errors = [], [], []
    for tenant in MIX:
        oracle = PeftOracle(folder, tenant.spec, dtype, device)
        layout = engine.adapters[tenant.run].layout
        oracle.load(layout, before[tenant.run])
        for op in gradient_passes([tenant]):
            output = mixed[op.run, op.seq]
            assert isinstance(output, PassOutput), output
            for datum, ours in zip(op.datums, output.logprobs, strict=True):
                theirs = oracle.logprobs(datum).detach().float().cpu()
                logprob_errors.append(float((torch.from_numpy(ours) - theirs).abs().max()))
            if op.needs_grad:
                loss, size = oracle.backward(op)
                loss_errors.append(abs(output.loss_sum - loss) / max(1.0, size))
        expected = oracle.arena(layout, grads=True)
        gradient_errors.append(relative_error(engine.adapters.state(tenant.run).grads, expected))
    return Parity(max(logprob_errors), max(gradient_errors), max(loss_errors))


def mixed_against_alone(folder: Path, device: str, dtype: torch.dtype | None, lora: BackendChoice = "auto") -> Alone:
    """Run two cycles of all tenants together, and of each alone in an engine of the same kind.

    Then run one more forward and backward of both from equal states.
    """
    together, alone = (engine_of(folder, device, dtype, lora) for _ in range(2))
    for cycle in range(2):
        together.run([op for tenant in MIX for op in tenant.ops(cycle)])
        for tenant in MIX:
            alone.run(tenant.ops(cycle))
    is_bit_equal = all(
        same_bits(together.adapters.state(tenant.run), alone.adapters.state(tenant.run)) for tenant in MIX
    )
    # From equal states: after a rounding error, AdamW moves a weight whose gradient is near zero the other way.
    for tenant in MIX:
        alone.adapters.restore(tenant.run, together.adapters.state(tenant.run))
    together.run(gradient_passes())
    for op in gradient_passes():
        alone.run([op])
    errors = [relative_error(*(each.adapters.state(tenant.run).grads for each in (together, alone))) for tenant in MIX]
    return Alone(is_bit_equal, max(errors))


def bf16_gradient_cosine(folder: Path, device: str, lora: BackendChoice = "auto") -> float:
    """Return the minimum cosine between a tenant's gradient on a bf16 base and that of `seg` in
    fp32.

    No ratio is clipped, because the gradient jumps at the bound of a ratio, and bf16 may be on its
    other side. Example: two tokens of the PPO tenant on `qwen2`, 0.8021 and 0.7525, gave 0.9958 for
    the same gradients.
    """
    wide = warmed_up(folder, device, torch.float32, "seg")
    narrow = engine_of(folder, device, torch.bfloat16, lora)
    for tenant in MIX:
        narrow.adapters.restore(tenant.run, wide.adapters.state(tenant.run))
    for engine in (wide, narrow):
        engine.run([unclipped(op) for op in gradient_passes()])
    return min(
        float(
            torch.cosine_similarity(
                narrow.adapters.state(tenant.run).grads, wide.adapters.state(tenant.run).grads, dim=0
            )
        )
        for tenant in MIX
    )
