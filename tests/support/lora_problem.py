"""Modules of a small base model with several adapters, and the results of a LoRA backend on them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import missing_kernels
from cotrain_workers.engine.lora.fused.tables import plan_groups
from cotrain_workers.engine.lora.quantized import FrozenWeight
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import RandomLinear, plus_mlp
from cotrain_workers.engine.routing import Segment, TrainingLora
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target, plan_layout

CPU = torch.device("cpu")

#: Mark of a test that runs kernels: they need Triton, and on a CPU its interpreter.
needs_kernels = pytest.mark.skipif(
    missing_kernels(CPU) is not None, reason=f"{missing_kernels(CPU)}: make test-kernels"
)

#: Three modules that read the same x, then two, then one. Their sizes fill no tile.
TARGETS = (
    Target("0.self_attn.q_proj", "attn", 72, 96),
    Target("0.self_attn.k_proj", "attn", 72, 24),
    Target("0.self_attn.v_proj", "attn", 72, 24),
    Target("0.mlp.gate_proj", "mlp", 72, 136),
    Target("0.mlp.up_proj", "mlp", 72, 136),
    Target("0.mlp.down_proj", "mlp", 136, 72),
)


@dataclass(frozen=True)
class Tenant:
    """Adapter with its rows in a micro-batch."""

    spec: AdapterSpec
    layout: Layout
    weights: torch.Tensor
    compute: Mapping[str, Pair]
    xs: Mapping[int, torch.Tensor]  # by width: [rows, width]
    slopes: Mapping[str, torch.Tensor]  # by module: [rows, outputs]

    @property
    def rows(self) -> int:
        """Return the number of its rows."""
        return len(next(iter(self.xs.values())))


@dataclass(frozen=True)
class Outcome:
    """Results of one tenant, by name."""

    values: Mapping[str, torch.Tensor]


def tenant(spec: AdapterSpec, rows: int, dtype: torch.dtype = torch.float32) -> Tenant:
    """Draw an adapter and its rows from its seed."""
    generator = torch.Generator().manual_seed(spec.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layout = plan_layout(spec, TARGETS)
    weights = torch.randn(layout.size, generator=generator) / 8
    return Tenant(
        spec,
        layout,
        weights,
        layout.views(weights.to(dtype)),
        {width: draw(rows, width) for width in sorted({target.inputs for target in TARGETS})},
        {target.name: draw(rows, target.outputs) for target in TARGETS},
    )


def linears(dtype: torch.dtype, *, biased: bool = False) -> dict[str, RandomLinear]:
    """Draw the base model's modules. `biased` gives all but the last a bias."""
    generator = torch.Generator().manual_seed(99)
    found = {}
    for each in TARGETS:
        weight = torch.randn(each.outputs, each.inputs, generator=generator) / 8
        bias = torch.randn(each.outputs, generator=generator) if biased else None
        is_biased = bias is not None and each is not TARGETS[-1]
        found[each.name] = RandomLinear(weight.to(dtype), bias.to(dtype) if is_biased else None)  # type: ignore[union-attr]
    return found


def work(
    backend: str,
    tenants: Sequence[Tenant],
    *,
    dtype: torch.dtype = torch.float32,
    filler: int = 0,
    biased: bool = False,
    gate: int | None = None,
    grads: Mapping[int, torch.Tensor] | None = None,
    frozen: Container[int] = (),
    stored: Callable[[torch.Tensor], FrozenWeight] = lambda weight: weight,
) -> list[Outcome]:
    """Return the results of each tenant after a forward and a backward through every module, or an
    MLP with a `gate`.

    `grads` are arenas by tenant to which gradients are added; the others start at zero. `frozen`
    tenants train nothing. `stored` returns a weight as the base model holds it.
    """
    plain = linears(dtype, biased=biased)
    modules = {name: replace(each, weight=stored(each.weight)) for name, each in plain.items()}
    arenas = [(grads or {}).get(at, torch.zeros_like(own.weights)) for at, own in enumerate(tenants)]
    # One mapping for one arena: it tells a backend which gradients belong together.
    views = {id(arena): own.layout.views(arena) for own, arena in zip(tenants, arenas, strict=True)}
    segments, end = [], 0
    for at, (own, arena) in enumerate(zip(tenants, arenas, strict=True)):
        wanted = None if at in frozen else views[id(arena)]
        segments.append(Segment(end, end + own.rows, own, own.spec.scale, wanted))
        end += own.rows
    rows = end + filler
    lora = SegmentLora(segments) if backend == "seg" else FusedLora(segments, rows, plan_groups(TARGETS), modules)
    found: list[dict[str, torch.Tensor]] = [{} for _ in tenants]
    if gate is None:
        _through_linears(lora, tenants, segments, filler, modules, found)
    else:
        _through_mlp(lora, tenants, segments, filler, modules, found, gate)
    for arena, values in zip(arenas, found, strict=True):
        values["gradient of its matrices"] = arena
    return [Outcome(values) for values in found]


def _through_linears(
    lora: TrainingLora,
    tenants: Sequence[Tenant],
    segments: Sequence[Segment],
    filler: int,
    modules: Mapping[str, RandomLinear],
    found: Sequence[dict[str, torch.Tensor]],
) -> None:
    for group in plan_groups(TARGETS):
        width = modules[group.names[0]].weight.shape[1]
        x = _row([own.xs[width] for own in tenants], filler).requires_grad_()
        ys = [lora.linear(name, x, modules[name].weight, modules[name].bias) for name in group.names]
        slopes = [_row([own.slopes[name] for own in tenants], filler) for name in group.names]
        gx = torch.autograd.grad(ys, x, slopes)[0]
        for segment, values in zip(segments, found, strict=True):
            here = slice(segment.start, segment.stop)
            values[f"gradient of what {group.names[0]} reads"] = gx[0, here].float()
            for name, y in zip(group.names, ys, strict=True):
                values[f"output of {name}"] = y.detach()[0, here].float()


def _through_mlp(
    lora: TrainingLora,
    tenants: Sequence[Tenant],
    segments: Sequence[Segment],
    filler: int,
    modules: Mapping[str, RandomLinear],
    found: Sequence[dict[str, torch.Tensor]],
    gate: int,
) -> None:
    names = [target.name for target in TARGETS[-3:]]
    x = _row([own.xs[TARGETS[-1].outputs] for own in tenants], filler).requires_grad_()
    y = plus_mlp(lora, names, modules, gate, x)
    slopes = _row([own.slopes[names[2]] for own in tenants], filler)
    gx = torch.autograd.grad(y, x, slopes)[0]
    for segment, values in zip(segments, found, strict=True):
        here = slice(segment.start, segment.stop)
        values["output of the MLP"] = y.detach()[0, here].float()
        values["gradient of what the MLP reads"] = gx[0, here].float()


def _row(of_tenants: Sequence[torch.Tensor], filler: int) -> torch.Tensor:
    """Return the rows of all tenants one after the other, `[1, T, width]`, followed by rows of zeros."""
    first = of_tenants[0]
    return torch.cat([*of_tenants, first.new_zeros(filler, first.shape[1])])[None]


def differences(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """Return the largest difference of each value relative to its maximum, or absolute if the maximum is 0."""
    return {
        name: float((ours.values[name] - value).abs().max() / (value.abs().max() or 1.0))
        for name, value in theirs.values.items()
        if value.numel()
    }


def same(ours: Outcome, theirs: Outcome) -> bool:
    """Return True if two outcomes have the same bits."""
    assert ours.values.keys() == theirs.values.keys()
    return all(torch.equal(ours.values[name], value) for name, value in theirs.values.items())
