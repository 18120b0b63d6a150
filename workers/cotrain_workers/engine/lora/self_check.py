"""Checks of the LoRA backends when an engine loads: their results, and on CUDA their time.

`grouped` and `fused` must match `seg` on a small random problem before they are used. `fused` and `grouped` are then
timed on one layer of the base model. Rates of GPUs differ, and so does the faster backend: on an H200, `fused` with
pointers was 12 % slower than `grouped`, and with descriptors 11 % faster (docs/adr/0035). The layer has its real
weights. Adapters and rows have random values, because a GPU multiplies equal values faster.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn import functional

from cotrain_workers.engine.lora.fused.fused_lora import FusedLora
from cotrain_workers.engine.lora.fused.operators import GELU, SILU
from cotrain_workers.engine.lora.fused.tables import plan_groups
from cotrain_workers.engine.lora.grouped import ROWS, GroupedLora, stack_class
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.routing import LinearWeights, Segment, TrainingLora
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target, plan_layout

# Relative to the largest value. fp32: another order of summation; measured 4e-7 at most on CPU. 16 bits: `grouped`
# rounds each product to 16 bits, where `seg` adds in fp32.
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
#: Adapters of the timing, their rows and spec, and its repetitions.
ADAPTERS, ROWS_EACH, SPEC, REPEATS = 4, 1024, AdapterSpec(16, seed=0), 5
#: A slower `fused` is kept within this factor, because it has the same bits for any neighbours.
MARGIN = 1.1
MLP = ("gate_proj", "up_proj", "down_proj")
#: Return the LoRA paths for segments, a number of rows and the modules of a layer.
NewLora = Callable[[Sequence[Segment], int, Sequence[Target]], TrainingLora]


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

    weight: torch.Tensor
    bias: torch.Tensor | None = None


def disagreement(
    device: torch.device,
    dtype: torch.dtype,
    lengths: Sequence[int] = LENGTHS,
    backend: Literal["grouped", "fused"] = "grouped",
    targets: Sequence[Target] = TARGETS,
) -> str | None:
    """Return the result in which a backend differs from `seg` by more than rounding, or None."""
    generator = torch.Generator().manual_seed(0)
    adapters = [random_adapter(spec, device, dtype, generator, targets) for spec in SPECS]
    rows = sum(-(-length // ROWS) * ROWS for length in lengths) + 24
    results = []
    for name in ("seg", backend):
        segments = segments_of(adapters, lengths)
        lora = lora_of(name, segments, rows, device, dtype, targets)
        results.append(run(lora, segments, rows, device, dtype, targets))
    for name, ours, theirs in zip(results[0][0], results[1][1], results[0][1], strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        if not error <= TOLERANCE[dtype]:
            return f"its {name} differs from that of a loop by {error:.1e} of the largest value"
    return None


def layer_seconds(
    backends: Mapping[str, NewLora],
    targets: Sequence[Target],
    linears: Mapping[str, LinearWeights],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the seconds of each backend for a forward and a backward of the first layer, the least of REPEATS.

    Backends alternate, so that a change of the clock affects all.
    """
    layer = first_layer(targets)
    generator = torch.Generator().manual_seed(0)
    adapters = [random_adapter(SPEC, device, dtype, generator, layer) for _ in range(ADAPTERS)]
    best = dict.fromkeys(backends, float("inf"))
    for at in range(REPEATS + 1):
        for name, new_lora in backends.items():
            _synchronize(device)
            began = time.perf_counter()
            _run_layer(new_lora, adapters, layer, linears, device, dtype)
            _synchronize(device)
            if at:  # the first call compiles kernels
                best[name] = min(best[name], time.perf_counter() - began)
    return best


def faster_than_fused(seconds: Mapping[str, float]) -> str:
    """Return why `grouped` is taken instead of `fused`, or an empty string."""
    fused, grouped = seconds["fused"], seconds["grouped"]
    if fused <= MARGIN * grouped:
        return ""
    return f"one layer takes {fused * 1e3:.2f} ms, grouped {grouped * 1e3:.2f} ms"


def first_layer(targets: Sequence[Target]) -> list[Target]:
    """Return the modules up to the second of the same name, without the unembedding."""
    layer: dict[str, Target] = {}
    for target in targets:
        name = target.name.rpartition(".")[2]
        if name in layer or target.family == "unembed":
            break
        layer[name] = target
    return list(layer.values())


def lora_of(
    name: str,
    segments: Sequence[Segment],
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    targets: Sequence[Target] = TARGETS,
) -> TrainingLora:
    """Return a LoRA backend for the random modules."""
    if name == "seg":
        return SegmentLora(segments)
    if name == "grouped":
        return GroupedLora(segments, rows, dtype)
    return FusedLora(segments, rows, plan_groups(targets), random_linears(device, dtype, targets))


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


def segments_of(adapters: Sequence[RandomAdapter], lengths: Sequence[int]) -> list[Segment]:
    """Return a segment with a zeroed gradient for each adapter, padded with filler to multiples of ROWS."""
    segments, start = [], 0
    pairs = zip(adapters, SPECS, lengths, strict=True)
    for adapter, spec, length in sorted(pairs, key=lambda each: stack_class(each[0].layout)):
        segments.append(Segment(start, start + length, adapter, spec.scale, adapter.new_gradient()))
        start += -(-length // ROWS) * ROWS
    return segments


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
    device: torch.device,
    dtype: torch.dtype,
    targets: Sequence[Target] = TARGETS,
) -> tuple[list[str], list[torch.Tensor]]:
    """Run random rows forward and backward through every module; return names and values of all results."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    owned = torch.zeros(rows, 1)
    for segment in segments:
        owned[segment.start : segment.stop] = 1
    x = random(1, rows, targets[0].inputs).requires_grad_()
    linears = random_linears(device, dtype, targets)
    names, found, slopes = [], [], []
    for target in targets[:-3]:
        out = lora.linear(target.name, x, linears[target.name].weight, None)
        slopes.append(random(1, rows, target.outputs) * owned.to(device, dtype))
        names.append(f"output of {target.name}")
        found.append(out)
    for gate, name in ((SILU, "SiLU"), (GELU, "GELU")):
        out = plus_mlp(lora, [target.name for target in targets[-3:]], linears, gate, x)
        slopes.append(random(*x.shape) * owned.to(device, dtype))
        names.append(f"output of an MLP with {name}")
        found.append(out)
    gradient = torch.autograd.grad(found, x, slopes)[0]
    found = [out.detach() * owned.to(device, dtype) for out in found]
    names.append("gradient of x")
    found.append(gradient)
    for segment in segments:
        for name, pair in (segment.grads or {}).items():
            names += [f"gradient of {name} A", f"gradient of {name} B"]
            found += [pair.a, pair.b]
    return names, [each.float() for each in found]


def _run_layer(
    new_lora: NewLora,
    adapters: Sequence[RandomAdapter],
    layer: Sequence[Target],
    linears: Mapping[str, LinearWeights],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Run random rows of every adapter forward and backward through the modules of a layer."""
    rows = ROWS_EACH * len(adapters)
    segments = [
        Segment(at * ROWS_EACH, (at + 1) * ROWS_EACH, adapter, 2.0, adapter.new_gradient())
        for at, adapter in enumerate(adapters)
    ]
    lora = new_lora(segments, rows, layer)
    mlp = [target for target in layer if target.name.rpartition(".")[2] in MLP]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    inputs = {width: random(1, rows, width).requires_grad_() for width in {target.inputs for target in layer}}
    found = [
        lora.linear(target.name, inputs[target.inputs], linears[target.name].weight, linears[target.name].bias)
        for target in layer
        if target not in mlp
    ]
    if mlp:
        names = [target.name for target in mlp]
        found.append(plus_mlp(lora, names, linears, SILU, inputs[mlp[0].inputs]))
    read = [inputs[width] for width in {each.inputs for each in layer if each not in mlp[1:]}]
    torch.autograd.grad(found, read, [random(*each.shape) for each in found])


def _synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
