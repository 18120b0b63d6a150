"""Time for samplers to get new weights: saves of many tenants, and loading into the decoder.

    python -m bench sampler_refresh --device cpu|cuda [--size 8b] [--tenants 32]

It needs torch, transformers, safetensors and numpy. Each round every tenant's weights change and are saved. A
decoder then loads them in place of the earlier ones, from the adapter if it is on the device, or from host memory. The
limit by memory bandwidth is printed as well: each adapter is read once in fp32, its slot zeroed and written once.
Ways alternate, and the minimum counts. A step of all tenants runs once, for comparison.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cycle.load import RANK, Load, create_runs, cycle
from bench.support.model import SHAPES, build
from bench.support.record import DEVICE, Args, Choice, Options, Report, show
from bench.support.roofline import copy_bandwidth
from bench.support.timing import Took, measure, turns
from cotrain_workers.engine.decoding.slot_pool import slot_layout
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import HostWeights, Save, SaveOutput

OPTIONS: Options = {
    **DEVICE,
    "size": (Choice(tuple(SHAPES)), "by default 5m on a CPU, else 8b"), "tenants": 32, "rounds": 4,
    "length": (256, "tokens of each tenant in the step that a save is compared with"),
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    size = args.size or ("5m" if args.device == "cpu" else "8b")
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        model = build((args.models or Path(folder)) / size, size, dtype, args.device)
        engine = Engine.load(str(model), device=args.device, dtype=dtype)
    report |= show({"size": size, **refresh(engine, args, dtype)})


def refresh(engine: Engine, args: Args, dtype: torch.dtype) -> dict[str, Any]:
    """Time the saves, both ways into the slots, and the arrival of all weights on the host."""
    create_runs(engine, args.tenants)
    runs = [f"run-{at}" for at in range(args.tenants)]
    slot_bytes = slot_layout(engine.targets, RANK).size * dtype.itemsize
    work = cycle(engine, Load(args.tenants, args.length, (args.tenants,)), args.tenants)
    best: dict[str, Took] = {"step": measure(work, args.device)}
    weights: dict[str, HostWeights] = {}
    room = args.tenants * slot_bytes
    slots = engine.decoder(weights.__getitem__, kv_tokens=4096, text=None, weights_bytes=room).slots
    for way in turns(("from the device", "from the host"), args.rounds + 1):
        for run in runs:
            engine.adapters[run].weights.add_(1e-6)
            engine.adapters[run].weights_changed()
        took = {"save": measure(partial(save, engine, runs, weights), args.device)}
        if way == "from the host":
            took["arrive"] = measure(lambda: [each.flat for each in weights.values()], args.device)
            weights.update({run: HostWeights(each.spec, each.flat.clone()) for run, each in weights.items()})
        took[way] = measure(lambda: [slots.pin(run) for run in runs], args.device)
        for run in runs:  # as at the end of its samplers
            slots.unpin(run)
            slots.drop(run)
        for name, each in took.items():
            best[name] = each.fastest(best.get(name, each))
    values = engine.adapters[runs[0]].weights.numel()
    possible_s = args.tenants * (4 * values + 2 * slot_bytes) / copy_bandwidth(args.device)
    return {
        "tenants": args.tenants, "adapter_mb": 4 * values / 1e6,
        **{f"{name}_ms": 1e3 * each.wall_s for name, each in best.items()},
        **{f"{name}_cpu_ms": 1e3 * each.cpu_s for name, each in best.items()},
        "save_cpu_of_step": best["save"].cpu_s / best["step"].cpu_s, "possible_ms": 1e3 * possible_s,
        "of_possible": possible_s / best["from the device"].wall_s,
    }  # fmt: skip


def save(engine: Engine, runs: Sequence[str], into: dict[str, HostWeights]) -> None:
    outputs = engine.run([Save(run, 1) for run in runs]).outputs
    for run in runs:
        saved = outputs[run, 1]
        assert isinstance(saved, SaveOutput), saved
        into[run] = saved.weights
