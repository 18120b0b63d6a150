"""Time of the LoRA backends on one layer of the base model, measured when an engine loads on CUDA.

Rates of GPUs differ, and so does the faster backend: on an H200, `fused` with pointers was 12 % slower than `grouped`, and
with descriptors 11 % faster (docs/adr/0035). The layer has its real weights. Adapters and rows have random values,
because a GPU multiplies equal values faster.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import torch

from cotrain_workers.engine.lora.fused.operators import SILU
from cotrain_workers.engine.lora.self_check import RandomAdapter, plus_mlp, random_adapter
from cotrain_workers.engine.routing import LinearWeights, Segment, TrainingLora
from cotrain_workers.engine.spec import AdapterSpec, Pair, Target

ADAPTERS, ROWS_EACH = 4, 1024
SPEC = AdapterSpec(16, seed=0)
REPEATS = 5
#: A slower `fused` is kept within this factor, because it has the same bits for any neighbours.
MARGIN = 1.1
MLP = ("gate_proj", "up_proj", "down_proj")

#: Return the LoRA paths for segments, a number of rows and the modules of a layer.
NewLora = Callable[[Sequence[Segment], int, Sequence[Target]], TrainingLora]


def layer_seconds(
    backends: Mapping[str, NewLora],
    targets: Sequence[Target],
    linears: Mapping[str, LinearWeights],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Return the seconds of each backend for a forward and a backward of the first layer, the least of some.

    Backends alternate, so that a change of the clock affects all.
    """
    layer = first_layer(targets)
    generator = torch.Generator().manual_seed(0)
    adapters = [random_adapter(SPEC, device, dtype, generator, layer) for _ in range(ADAPTERS)]
    best = dict.fromkeys(backends, float("inf"))
    for at in range(REPEATS + 1):
        for name, new_lora in backends.items():
            synchronize(device)
            began = time.perf_counter()
            run_layer(new_lora, adapters, layer, linears, device, dtype)
            synchronize(device)
            if at:  # the first call compiles kernels
                best[name] = min(best[name], time.perf_counter() - began)
    return best


def first_layer(targets: Sequence[Target]) -> list[Target]:
    """Return the modules up to the second of the same name."""
    seen: set[str] = set()

    def is_new(target: Target) -> bool:
        name = target.name.rpartition(".")[2]
        known = name in seen or target.family == "unembed"
        seen.add(name)
        return not known

    return list(takewhile(is_new, targets))


def run_layer(
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
        Segment(at * ROWS_EACH, (at + 1) * ROWS_EACH, adapter, 2.0, gradient_of(adapter))
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


def gradient_of(adapter: RandomAdapter) -> Mapping[str, Pair]:
    """Return an empty gradient of an adapter."""
    return adapter.layout.views(torch.zeros_like(adapter.weights, dtype=torch.float32))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def faster_than_fused(seconds: Mapping[str, float]) -> str:
    """Return why `grouped` is taken instead of `fused`, or an empty string."""
    fused, grouped = seconds["fused"], seconds["grouped"]
    if fused <= MARGIN * grouped:
        return ""
    return f"one layer takes {fused * 1e3:.2f} ms, grouped {grouped * 1e3:.2f} ms"
