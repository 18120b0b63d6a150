"""Check of the LoRA backend `fused` when an engine loads: it must match `seg` on a small random problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn import functional

from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import GELU, SILU
from cotrain_workers.engine.lora.fused.tables import plan_groups
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.routing import LinearWeights, Segment, TrainingLora
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target, plan_layout

# Relative to the largest value. In fp32 only the order of summation differs, by 4e-7 at most on a CPU. In 16 bits `seg`
# rounds the base model's product before it adds LoRA's, and `fused` rounds only their sum.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
SPECS = (
    *(AdapterSpec(rank, seed=0) for rank in (8, 1, 5)),
    AdapterSpec(4, 0, train_mlp=False),
    AdapterSpec(16, 0, train_attn=False, alpha=3.0),
    AdapterSpec(40, 0),
)
TARGETS = (
    Target("0.self_attn.q_proj", "attn", 64, 96),
    Target("0.self_attn.k_proj", "attn", 64, 32),
    Target("0.self_attn.v_proj", "attn", 64, 32),
    Target("0.mlp.gate_proj", "mlp", 64, 128),
    Target("0.mlp.up_proj", "mlp", 64, 128),
    Target("0.mlp.down_proj", "mlp", 128, 64),
)
#: The same modules, wide enough that kernels use the tile sizes of a real model.
WIDE_TARGETS = tuple(replace(each, inputs=16 * each.inputs, outputs=16 * each.outputs) for each in TARGETS)
LENGTHS = (1, 9, 40, 8, 30, 70)
FILLER = 24  # rows after the last adapter's


@dataclass(frozen=True)
class RandomAdapter:
    """Adapter with random A and B."""

    layout: Layout
    weights: torch.Tensor
    compute: Mapping[str, Pair]

    def new_gradient(self) -> Mapping[str, Pair]:
        """Return a gradient of zeros."""
        return self.layout.views(torch.zeros_like(self.weights))


@dataclass
class RandomLinear:
    """Random module of the base model."""

    weight: Any  # a tensor, or in tests a QuantizedWeight
    bias: torch.Tensor | None = None


def disagreement(device: torch.device, dtype: torch.dtype, targets: Sequence[Target] = TARGETS) -> str | None:
    """Return the result in which `fused` differs from `seg` by more than rounding, or None."""
    generator = torch.Generator().manual_seed(0)
    adapters = [random_adapter(spec, device, dtype, generator, targets) for spec in SPECS]
    linears = random_linears(device, dtype, targets)
    rows = sum(LENGTHS) + FILLER
    looped, fused = segments_of(adapters), segments_of(adapters)
    expected = run(SegmentLora(looped), looped, rows, linears, targets)
    found = run(FusedLora(fused, rows, plan_groups(targets), linears), fused, rows, linears, targets)
    for (name, theirs), (_, ours) in zip(expected, found, strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        if not error <= TOLERANCE[dtype]:
            return f"its {name} differs from that of a loop by {error:.1e} of the largest value"
    return None


def random_linears(
    device: torch.device, dtype: torch.dtype, targets: Sequence[Target] = TARGETS
) -> dict[str, RandomLinear]:
    """Return random modules of the base model, drawn on the host."""
    generator = torch.Generator().manual_seed(2)
    return {
        target.name: RandomLinear(
            (torch.randn(target.outputs, target.inputs, generator=generator) / 8).to(device, dtype)
        )
        for target in targets
    }


def random_adapter(
    spec: AdapterSpec,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    targets: Sequence[Target] = TARGETS,
) -> RandomAdapter:
    """Return a random adapter, drawn on the host so that it is equal on every device."""
    layout = plan_layout(spec, targets)
    weights = (torch.randn(layout.size, generator=generator) / 8).to(device)
    return RandomAdapter(layout, weights, layout.views(weights.to(dtype)))


def segments_of(adapters: Sequence[RandomAdapter]) -> list[Segment]:
    """Return a segment with a zeroed gradient for each adapter of SPECS."""
    spans = pairwise(accumulate(LENGTHS, initial=0))
    return [
        Segment(start, stop, adapter, spec.scale, adapter.new_gradient())
        for (start, stop), adapter, spec in zip(spans, adapters, SPECS, strict=True)
    ]


def plus_mlp(
    lora: TrainingLora, modules: Sequence[str], linears: Mapping[str, LinearWeights], gate: int, x: torch.Tensor
) -> torch.Tensor:
    """Return `x` plus the output of an MLP; `modules` are its gate, up and down."""
    if isinstance(lora, FusedLora):
        lora.add_to(modules[2], x)
        return lora.mlp(modules[0], modules[2], gate, x)

    def linear(module: str, x: torch.Tensor) -> torch.Tensor:
        return lora.linear(module, x, linears[module].weight, linears[module].bias)

    first = linear(modules[0], x)
    first = functional.silu(first) if gate == SILU else functional.gelu(first, approximate="tanh")
    return x + linear(modules[2], first * linear(modules[1], x))


def run(
    lora: TrainingLora,
    segments: Sequence[Segment],
    rows: int,
    linears: Mapping[str, LinearWeights],
    targets: Sequence[Target] = TARGETS,
) -> list[tuple[str, torch.Tensor]]:
    """Run random rows forward and backward through every module; return all results with their names."""
    generator = torch.Generator().manual_seed(1)
    like = linears[targets[0].name].weight

    def random(width: int) -> torch.Tensor:
        return torch.randn(1, rows, width, generator=generator).to(like)

    x = random(targets[0].inputs).requires_grad_()
    *plain, gate_proj, up_proj, down_proj = [target.name for target in targets]
    found = [(f"output of {name}", lora.linear(name, x, linears[name].weight, None)) for name in plain]
    for gate, kind in ((SILU, "SiLU"), (GELU, "GELU")):
        out = plus_mlp(lora, [gate_proj, up_proj, down_proj], linears, gate, x)
        found.append((f"output of an MLP with {kind}", out))
    outs = [out for _, out in found]
    found.append(("gradient of x", torch.autograd.grad(outs, x, [random(out.shape[2]) for out in outs])[0]))
    for segment in segments:
        for name, pair in (segment.grads or {}).items():
            found += [(f"gradient of {name} A", pair.a), (f"gradient of {name} B", pair.b)]
    return [(name, value.detach().float()) for name, value in found]
