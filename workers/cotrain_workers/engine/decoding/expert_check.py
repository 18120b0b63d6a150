"""Selection of the kernels of experts for a decoder, after a comparison with the loop over experts and adapters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cotrain_workers.engine.decoding.slot_pool import Pool, Slot, filling_of, slot_layout
from cotrain_workers.engine.decoding.step import MixedStep, RowLora
from cotrain_workers.engine.decoding.step_experts import StepExperts, Units, experts_of_step, units_of
from cotrain_workers.engine.lora.fused.operators import SILU, missing_kernels
from cotrain_workers.engine.lora.self_check import TOLERANCE
from cotrain_workers.engine.model.attention import NARROW
from cotrain_workers.engine.model.base_model import BaseModel
from cotrain_workers.engine.model.experts import experts_by_adapter
from cotrain_workers.engine.model.kernel_check import (
    EXPERTS,
    SIZES,
    WIDE_SIZES,
    RandomExperts,
    Tokens,
    agrees,
    random_experts,
    random_tokens,
)
from cotrain_workers.engine.spec import AdapterSpec, has_experts

#: Two ranks of one class, a larger one, and a rank of both kinds.
SPECS = (
    *(AdapterSpec(rank, seed=0, alpha=2.0 * rank) for rank in (3, 8, 20)),
    AdapterSpec(8, seed=0, per_expert=True),
)
#: Adapters of the rows, by their number in SPECS; None: no adapter. Rows at the end have more than one run.
ROWS = (None, None, 0, 1, 1, *[2] * 24, 3, 3, 0, None)

log = logging.getLogger(__name__)


def fused_units(base: BaseModel) -> Mapping[str, Units]:
    """Return the units of a model's experts; empty without experts, or if a loop must compute them.

    On CUDA, the log then contains the reason. Raises DeviceLost.
    """
    weight = base.head_weight
    if not (has_experts(base.targets) and weight.is_cuda):
        return {}
    reason = base.router.unfused_experts or missing_kernels(weight.device)
    if weight.dtype not in NARROW:
        reason = f"no kernel of experts for {weight.dtype}"
    if reason:
        log.warning("Decoding is slow here, a loop over experts and adapters: %s", reason)
        return {}
    return units_of(base.targets) if experts_are_right(weight.device, weight.dtype, base.router.expert_gate) else {}


def experts_are_right(device: torch.device, dtype: torch.dtype, gate: int = SILU) -> bool:
    """Return True if the kernels with a gate match the loop over experts and adapters; a failure or a mismatch is logged.

    Raises DeviceLost.
    """
    # On a CPU, kernels are interpreted, and the wide sizes take minutes.
    sizes = [SIZES, WIDE_SIZES] if device.type == "cuda" else [SIZES]

    def measure() -> float:
        return max(difference(device, dtype, own, gate) for own in sizes)

    what = "The decoder's kernel of experts, without which it is slow,"
    return agrees(what, device, TOLERANCE[dtype], measure)


def difference(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int] = SIZES, gate: int = SILU) -> float:
    """Return the largest difference of kernels from the loop, relative to the largest value.

    Rows are generated tokens, rows of prompts, and both in turn.
    """
    module = random_experts(gate, sizes, device, dtype, EXPERTS)
    adapters = random_slots(module, SPECS)
    slots = [None if each is None else adapters[each] for each in ROWS]
    tokens = random_tokens(module, len(slots) + 3)
    expected = run(module, tokens, slots, None).float()
    found = [
        run(module, tokens, slots, experts_of_step(units_of(module.targets), slots, kinds, len(tokens.x), device))
        for kinds in ([False] * len(slots), [True] * len(slots), [at % 3 > 0 for at in range(len(slots))])
    ]
    return max(float((each.float() - expected).abs().max() / expected.abs().max()) for each in found)


def run(
    module: RandomExperts, tokens: Tokens, slots: Sequence[Slot | None], kernels: StepExperts | None
) -> torch.Tensor:
    """Return the output of experts in a step, computed by kernels or, without them, in a loop."""
    lora = RowLora(slots, tokens.x.device)
    attention: Any = None  # experts need none
    module.cotrain_router = SimpleNamespace(step=MixedStep(attention, lora, experts=kernels))
    return experts_by_adapter(module, tokens.x, tokens.chosen, tokens.weights)


def random_slots(module: RandomExperts, specs: Sequence[AdapterSpec]) -> list[Slot]:
    """Return a slot with random weights for each adapter, in pools by kind."""
    like, generator = module.down_proj, torch.Generator().manual_seed(3)
    layouts = [slot_layout(module.targets, spec.rank, per_expert=spec.per_expert) for spec in specs]
    pools: dict[tuple[int, bool], Pool] = {}
    for layout in layouts:
        pool = pools.setdefault(layout.kind, Pool(layout, like.new_zeros(0, layout.size)))
        pool.grow(1)
    slots = []
    for spec, layout in zip(specs, layouts, strict=True):
        pool, filling = pools[layout.kind], filling_of(spec, module.targets, layout)
        slot = Slot(pool, pool.free.pop(), filling.modules)
        weights = torch.randn(filling.arena_size, generator=generator) / 8
        filling.write(weights.to(like), spec.scale, pool.flat[slot.index])
        slots.append(slot)
    return slots
