"""Cost per layer of a training pass and a decode step: launches, bytes and kept memory, without a GPU.

    python -m bench cost [--sizes 0.6b,8b] [--tenants 4] [--length 2048] [--lora fused,grouped,seg] [--json]

The size `30b-a3b` is a mixture of experts, which has no `grouped`; `seg` takes minutes of CPU time. Each of its
experts has equally many tokens.

The engine itself runs on a CUDA device with shapes but without values (`tests/support/fake_cuda.py`, which
needs a C++ compiler). Two layer counts are compared, so the cost of any number of layers follows by scaling. The
tokens/s next to the counts are an estimate at the rates of an H200. Each launch takes as long as its FLOP or
its bytes, whichever is longer, and at least 2 us.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.support.fake_engine import BF16, DEVICE, FakeEngine, on_fake_device, run_on_fake_cuda
from bench.support.model import MIXTURES, SHAPES, Mixture, Shape
from bench.support.record import Options, Report
from cotrain_workers.engine.decoding import model_runner
from cotrain_workers.engine.decoding.cuda_graphs import graph_tables
from cotrain_workers.engine.decoding.cuda_kernels import Grouped, GroupedLora, KernelAttention
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.row_lora import RowLora
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot, slot_layout
from cotrain_workers.engine.decoding.step import Lora, MixedStep
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Datum, Failure, OptimStep, Pass
from cotrain_workers.engine.spec import AdapterSpec
from tests.support import fake_cuda
from tests.support.fake_cuda import Launch, LaunchLog

#: Rates of an H200: GEMMs in bf16, FlashAttention 2, a copy, and the duration of the smallest kernel.
GEMM_FLOPS, FLASH_FLOPS, COPY_BYTES, LEAST_S = 680e12, 290e12, 4.0e12, 2e-6
FLASH_3_FLOPS = 520e12  # if its wheel is installed
PAGE = 256
LAYERS = (2, 3)  # with a single layer, memory would peak in the head

OPTIONS: Options = {
    "sizes": ["8b"], "tenants": 4, "length": 2048, "rank": 16, "lora": ["fused", "grouped", "seg"],
    "recompute": (False, "compute activations again in backward"), "plain": (False, "layers as transformers has them"),
    "rows": 128, "adapters": 64, "context": 1024,
    "ops": (False, "print launches, KB and us per token of each op in training"),
    "json": (False, "print JSON"),
}  # fmt: skip


class Cost(NamedTuple):
    """Cost of one layer, of everything outside the layers, or of a whole model."""

    launches: float
    bytes: float
    seconds: float
    seconds_flash_3: float  # with FlashAttention 3
    kept_bytes: float = 0.0  # increase at the peak

    def with_layers(self, layer: Cost, layers: int) -> Cost:
        """Return the cost with `layers` more layers; -1 takes one away."""
        return Cost(*(a + layers * b for a, b in zip(self, layer, strict=True)))


def flops(launch: Launch) -> float:
    """Return the FLOP of a product; 0 for launches that are bound by their bytes."""
    shapes = [each for each in launch.args if isinstance(each, tuple)]
    match launch.name:
        case "lora_expand":
            return 2.0 * size(shapes[0]) * sum(int(weight[0]) for weight in launch.args[1])
        case "expert_expand" | "expert_expand_back":
            weights = launch.args[1]
            rows = launch.args[0] if launch.name == "expert_expand" else launch.args[0][0]
            return 2.0 * int(rows[0]) * len(weights) * size(weights[0][1:])
        case "lora_expand_back":
            return sum(2.0 * size(g) * int(w[1]) for g, w in zip(*launch.args[:2], strict=True))
        case "mm" | "_grouped_mm" | "bmm" | "linear":
            left, right = shapes[0], shapes[1]
            if launch.name == "linear":
                return 2.0 * size(left) * int(right[0])
            return 2.0 * size(left) * int(right[-1])
        case _:
            return 0.0


def size(shape: Sequence[int]) -> int:
    """Return the number of values in a tensor of this shape."""
    return prod(shape)


def flash_flops(launch: Launch) -> float:
    """Return the FLOP of causal attention, half of the square: 2 S H D per token, 2.5 times that for backward."""
    if not launch.name.startswith("_varlen_attn"):
        return 0.0
    is_back = launch.name.endswith("backward")
    longest = next(each for each in launch.args if type(each) is int)
    return 2.0 * size(launch.args[1 if is_back else 0]) * longest * (2.5 if is_back else 1.0)


def seconds(launch: Launch, flash: float = FLASH_FLOPS) -> float:
    """Return the estimated duration of a launch on an H200."""
    compute = flops(launch) / GEMM_FLOPS + flash_flops(launch) / flash
    return max(compute, launch.bytes / COPY_BYTES, LEAST_S)


def cost_of(log: LaunchLog) -> Cost:
    return cost_of_launches(log.launches)._replace(kept_bytes=log.peak)


def cost_of_launches(launches: Sequence[Launch]) -> Cost:
    return Cost(
        sum(fake_cuda.counts(launches).values()),
        sum(each.bytes for each in launches),
        sum(map(seconds, launches)),
        sum(seconds(each, FLASH_3_FLOPS) for each in launches),
    )


def by_op(one: LaunchLog, two: LaunchLog) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Return the cost of each op within a layer and outside the layers, most expensive first."""
    both: list[dict[str, Cost]] = []
    for log in (one, two):
        names = sorted({each.name for each in log.launches})
        own = {name: [each for each in log.launches if each.name == name] for name in names}
        both.append({name: cost_of_launches(launches) for name, launches in own.items()})
    none = Cost(0, 0, 0, 0)
    layer = {name: found.with_layers(both[0].get(name, none), -1) for name, found in both[1].items()}
    outside = {name: both[0][name].with_layers(layer[name], -LAYERS[0]) for name in both[0]}
    return dearest_first(layer), dearest_first(outside)


def dearest_first(found: dict[str, Cost]) -> dict[str, Cost]:
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def train(shape: Shape, layers: int, settings: argparse.Namespace) -> tuple[FakeEngine, FakeEngine]:
    """Run one pass and one optimizer step of every tenant; return the log of each."""
    fake, steps = FakeEngine(shape, layers, settings), SimpleNamespace(log=fake_cuda.LaunchLog())
    ids = np.zeros(settings.length, np.int64)
    datum = Datum(ids, {"target_tokens": ids, "weights": np.ones(settings.length, np.float32)})

    def work(engine: Engine) -> None:
        runs = [f"r{at}" for at in range(settings.tenants)]
        engine.run([Create(run, 0, AdapterSpec(settings.rank, seed=0)) for run in runs])
        for run in runs:
            _ = engine.adapters[run].gradient  # as from the second cycle on
        fake.reads.clear()
        fake.log.launches.clear()
        with fake.log:
            found = engine.run([Pass(run, 1, [datum], "cross_entropy", {}, True) for run in runs])
        with steps.log:
            stepped = engine.run([OptimStep(run, 2, 1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0) for run in runs])
        for output in (*found.outputs.values(), *stepped.outputs.values()):
            assert not isinstance(output, Failure), output

    on_fake_device(fake, work)
    return fake, steps  # type: ignore[return-value]


def decode(shape: Shape, layers: int, settings: argparse.Namespace) -> FakeEngine:
    """Run one decode step of `rows` sequences over `adapters` adapters.

    It is the step that a graph captures. A mixture of experts has no graph, and adds LoRA by row.
    """
    fake, rows = FakeEngine(shape, layers, settings), settings.rows
    pages = -(-settings.context // PAGE)

    def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=DEVICE)

    def work(engine: Engine) -> None:
        base = engine._base
        cache = KvCache(base.kv, rows * pages, PAGE, DEVICE, BF16)
        layout = slot_layout(base.targets, settings.rank)
        pool = Pool(layout, zeros(settings.adapters + 2, layout.size, dtype=BF16))
        lengths, table = (zeros(*each, dtype=torch.int32) for each in ((rows,), (rows, pages)))
        tables = graph_tables(zeros(rows), lengths, table, cache)
        lora: Lora = GroupedLora([Grouped(0, rows, pool, zeros(len(pool.flat), dtype=torch.int32))])
        if isinstance(shape, Mixture):
            names = frozenset(layout.target_by_name)
            slots = [Slot(pool, at + 1, names) for at in range(settings.adapters)]
            lora = RowLora([slots[at * len(slots) // rows] for at in range(rows)], DEVICE)
        route = MixedStep(KernelAttention(cache, tables), lora)
        fake.reads.clear()
        fake.log.launches.clear()
        with torch.no_grad(), fake.log:
            model_runner.run_model(base, zeros(1, rows), zeros(1, rows), route)

    on_fake_device(fake, work)
    return fake


def report(size: str, settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the cost of training with each LoRA backend, then of a decode step."""
    shape = (SHAPES | MIXTURES)[size]
    tokens = settings.tenants * settings.length
    for name in settings.lora:
        if isinstance(shape, Mixture) and name == "grouped":
            continue
        own = argparse.Namespace(**{**vars(settings), "backend": name})
        (one, step), (two, _) = (train(shape, layers, own) for layers in LAYERS)
        costs = [cost_of(fake.log) for fake in (one, two)]
        layer = costs[1].with_layers(costs[0], -1)
        outside = costs[0].with_layers(layer, -LAYERS[0])
        whole = outside.with_layers(layer, shape.layers)
        adam = cost_of(step.log)
        yield {
            **{"what": "train", "size": size, "lora": name},
            **{"tenants": settings.tenants, "length": settings.length},
            "launches_per_layer": layer.launches,
            "kb_per_token_and_layer": layer.bytes / tokens / 1e3,
            "kept_kb_per_token_and_layer": layer.kept_bytes / tokens / 1e3,
            "launches_outside": outside.launches,
            "kb_per_token_outside": outside.bytes / tokens / 1e3,
            "launches_of_steps": adam.launches,
            "host_reads": reads_of(shape, one, two),
            "estimated_tokens_per_s": tokens / whole.seconds,
            "estimated_with_flash_3": tokens / whole.seconds_flash_3,
            **{
                f"ops{where}": {
                    op: (each.launches, each.bytes / tokens / 1e3, each.seconds / tokens * 1e6)
                    for op, each in found.items()
                    if each.seconds > 0
                }
                for where, found in zip(("", "_outside"), by_op(one.log, two.log), strict=True)
            },
        }
    backend = "seg" if isinstance(shape, Mixture) else "grouped"
    own = argparse.Namespace(**{**vars(settings), "backend": backend})
    head_s = shape.hidden * shape.vocab * BF16.itemsize / COPY_BYTES
    one, two = (decode(shape, layers, own) for layers in LAYERS)
    costs = [cost_of(fake.log) for fake in (one, two)]
    layer = costs[1].with_layers(costs[0], -1)
    each = fake_cuda.counts(two.log.launches)
    each.subtract(fake_cuda.counts(one.log.launches))
    yield {
        **{"what": "decode", "size": size, "rows": settings.rows, "adapters": settings.adapters},
        "launches_per_layer": layer.launches,
        "mb_per_layer": layer.bytes / 1e6,
        "host_reads": reads_of(shape, one, two),
        # Without the choice of tokens, and without the host's work between two steps and between launches.
        "estimated_tokens_per_s": settings.rows / (shape.layers * layer.seconds + head_s),
        "ops": {op: count for op, count in each.most_common() if count},
    }


def reads_of(shape: Shape, one: FakeEngine, two: FakeEngine) -> int:
    """Return the number of host reads of a whole model, given those of the two layer counts."""
    first, second = (sum(each.reads.values()) for each in (one, two))
    return first + (shape.layers - LAYERS[0]) * (second - first)


def run(settings: argparse.Namespace, _: Report) -> int:
    """Count, and print the counts."""
    return run_on_fake_cuda(lambda: count(settings))


def count(settings: argparse.Namespace) -> None:
    """Print the counts of each size."""
    rows = [row for size in settings.sizes for row in report(size, settings)]
    if settings.json:
        print(json.dumps(rows))
        return
    for row in rows:
        each = {name: value for name, value in row.items() if not name.startswith("ops")}
        print("  ".join(f"{name} {show(value)}" for name, value in each.items()))
        for name in ("ops", "ops_outside") if settings.ops and "lora" in row else ():
            for op, found in row[name].items():
                print(f"  {name:12} {op:32}" + "".join(f"{value:10.3f}" for value in found))


def show(value: object) -> str:
    """Return a number with its significant digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
