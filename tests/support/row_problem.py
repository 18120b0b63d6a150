"""Rows of several adapters in a decoder step, and their LoRA by the kernels and by plain products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cotrain_workers.engine.decoding.lora_kernel import Siblings, add_lora, lora_tables, siblings_of
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot, slot_layout
from cotrain_workers.engine.spec import Target

CPU = torch.device("cpu")
#: Three modules that read the same x, then two, then one. Their sizes fill no tile.
TARGETS = (
    Target("0.self_attn.q_proj", "attn", 72, 96),
    Target("0.self_attn.k_proj", "attn", 72, 24),
    Target("0.self_attn.v_proj", "attn", 72, 24),
    Target("0.mlp.gate_proj", "mlp", 72, 136),
    Target("0.mlp.up_proj", "mlp", 72, 136),
    Target("0.mlp.down_proj", "mlp", 1300, 37),
    Target("lm_head", "unembed", 72, 131),
)
NAMES = frozenset(target.name for target in TARGETS)
GROUPS = tuple(siblings_of(TARGETS))


def slots(
    rank: int,
    count: int = 1,
    *,
    seed: int = 0,
    spare: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    names: frozenset[str] = NAMES,
) -> list[Slot]:
    """Return adapters of one rank in a pool, behind `spare` slots of NaN."""
    layout = slot_layout(TARGETS, rank)
    values = torch.randn(count, layout.size, generator=torch.Generator().manual_seed(seed)) / 8
    pool = Pool(layout, torch.cat([torch.full((spare, layout.size), torch.nan), values]).to(device, dtype))
    return [Slot(pool, spare + at, names) for at in range(count)]


def operands(own: Siblings, rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return `x` and the outputs of the base model, row by row the same for every number of rows."""
    g = torch.Generator().manual_seed(7)
    whole = torch.randn(rows, own.targets[0].inputs + sum(each.outputs for each in own.targets), generator=g)
    x, *ys = whole.split([own.targets[0].inputs, *(each.outputs for each in own.targets)], dim=1)
    return (x / 8).contiguous().to(dtype), [y.to(dtype).contiguous() for y in ys]


def added(
    own: Siblings, rows: Sequence[Slot | None], x: torch.Tensor, ys: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs with LoRA by the kernels."""
    found = [y.to(x.device).clone() for y in ys]
    add_lora(own, lora_tables(rows, x.device), x, found)
    return [y.cpu() for y in found]


def expected(
    own: Siblings, rows: Sequence[Slot | None], x: torch.Tensor, ys: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs with LoRA in fp64, row by row."""
    found = [y.double().clone() for y in ys]
    for row, slot in enumerate(rows):
        for target, y in zip(own.targets, found, strict=True):
            if slot is not None and target.name in slot.modules:
                a, b = (each[0].cpu().double() for each in slot.pool.repeated(target.name, slot.index, 1))
                y[row] += (x[row].cpu().double() @ a.t() @ b)[: target.outputs]
    return found


def gap(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Return the largest difference, relative to the largest value."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
