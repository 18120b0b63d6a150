"""Cost per layer of a training pass and a decode step: launches, bytes and kept memory, without a GPU.

    python -m bench cost [--sizes 0.6b,8b] [--tenants 4] [--length 2048] [--lora fused,seg] [--json]

The size `30b-a3b` is a mixture of experts, where `seg` takes minutes of CPU time. Each of its experts has equally
many tokens.

The engine itself runs on a CUDA device with shapes but without values (`tests/support/fake_cuda.py`, which
needs a C++ compiler). Two layer counts are compared, so the cost of any number of layers follows by scaling. The
tokens/s next to the counts are an estimate at the rates of an H200. Each launch takes as long as its FLOP or
its bytes, whichever is longer, and at least 2 us.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from bench.support.fake_engine import BF16, DEVICE, FakeEngine, a_pass, begin, on_fake_device, run_on_fake_cuda
from bench.support.model import MIXTURES, SHAPES, Mixture, Shape
from bench.support.record import Args, Options, Report, show
from cotrain_workers.engine.decoding import model_runner
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.lora_kernel import FAMILIES, KernelLora, LoraTables, siblings_of
from cotrain_workers.engine.decoding.page_kernel import KernelAttention, graph_tables
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot, padded_rank, slot_layout
from cotrain_workers.engine.decoding.step import MixedStep
from cotrain_workers.engine.decoding.step_experts import experts_of_step, units_of
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Failure, OptimStep
from tests.support.fake_cuda import Launch, LaunchLog, counts

#: Rates of an H200: GEMMs in bf16, FlashAttention 2, a copy, and the duration of the smallest kernel.
GEMM_FLOPS, FLASH_FLOPS, COPY_BYTES, LEAST_S = 680e12, 290e12, 4.0e12, 2e-6
FLASH_3_FLOPS = 520e12  # if its wheel is installed
PAGE = 256
LAYERS = (2, 3)  # with a single layer, memory would peak in the head

OPTIONS: Options = {
    "sizes": ["8b"], "tenants": 4, "length": 2048, "rank": 16, "lora": ["fused", "seg"],
    "rows": 128, "adapters": 64, "context": 1024,
    "json": (False, "print JSON, which has launches, KB and us per token of each op in training"),
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


def run(settings: Args, _: Report) -> int:
    return run_on_fake_cuda(lambda: count(settings))


def count(settings: Args) -> None:
    rows = [row for size in settings.sizes for row in report(size, settings)]
    if settings.json:
        print(json.dumps(rows))
        return
    for row in rows:
        show({name: value for name, value in row.items() if not name.startswith("ops")})


def report(size: str, settings: Args) -> Iterator[dict[str, Any]]:
    """Yield the cost of training with each LoRA backend, then of a decode step."""
    shape = (SHAPES | MIXTURES)[size]
    tokens = settings.tenants * settings.length
    for name in settings.lora:
        own = Args(**{**vars(settings), "backend": name})
        (one, step), (two, _) = (train(shape, layers, own) for layers in LAYERS)
        layer, outside = split(cost_of(one.log), cost_of(two.log))
        whole = outside.with_layers(layer, shape.layers)
        yield {
            "what": "train", "size": size, "lora": name, "tenants": settings.tenants, "length": settings.length,
            "launches_per_layer": layer.launches, "kb_per_token_and_layer": layer.bytes / tokens / 1e3,
            "kept_kb_per_token_and_layer": layer.kept_bytes / tokens / 1e3,
            "launches_outside": outside.launches, "kb_per_token_outside": outside.bytes / tokens / 1e3,
            "launches_of_steps": cost_of(step).launches, "host_reads": reads_of(shape, one, two),
            "estimated_tokens_per_s": tokens / whole.seconds, "estimated_with_flash_3": tokens / whole.seconds_flash_3,
            **{
                f"ops{where}": {
                    op: (each.launches, each.bytes / tokens / 1e3, each.seconds / tokens * 1e6)
                    for op, each in found.items()
                    if each.seconds > 0
                }
                for where, found in zip(("", "_outside"), by_op(one.log, two.log), strict=True)
            },
        }  # fmt: skip
    own = Args(**{**vars(settings), "backend": "fused"})
    head_s = shape.hidden * shape.vocab * BF16.itemsize / COPY_BYTES
    one, two = (decode(shape, layers, own) for layers in LAYERS)
    layer, _ = split(cost_of(one.log), cost_of(two.log))
    ops = counts(two.log.launches)
    ops.subtract(counts(one.log.launches))
    yield {
        "what": "decode", "size": size, "rows": settings.rows, "adapters": settings.adapters,
        "launches_per_layer": layer.launches, "mb_per_layer": layer.bytes / 1e6,
        "host_reads": reads_of(shape, one, two),
        # Without the choice of tokens, and without the host's work between two steps and between launches.
        "estimated_tokens_per_s": settings.rows / (shape.layers * layer.seconds + head_s),
        "ops": {op: count for op, count in ops.most_common() if count},
    }  # fmt: skip


def reads_of(shape: Shape, one: FakeEngine, two: FakeEngine) -> int:
    """Return the number of host reads of a whole model, given those of the two layer counts."""
    first, second = (sum(each.reads.values()) for each in (one, two))
    return first + (shape.layers - LAYERS[0]) * (second - first)


def split(one: Cost, two: Cost) -> tuple[Cost, Cost]:
    """Return the cost of one layer, and of everything outside the layers, given those of the two layer counts."""
    layer = two.with_layers(one, -1)
    return layer, one.with_layers(layer, -LAYERS[0])


def by_op(one: LaunchLog, two: LaunchLog) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Return the cost of each op within a layer and outside the layers, most expensive first."""
    found: list[dict[str, list[Launch]]] = [defaultdict(list), defaultdict(list)]
    for by_name, log in zip(found, (one, two), strict=True):
        for launch in log.launches:
            by_name[launch.name].append(launch)
    both = {name: split(*(cost_of_launches(each[name]) for each in found)) for name in sorted({*found[0], *found[1]})}
    layer, outside = (
        dict(sorted(((name, cost[at]) for name, cost in both.items()), key=lambda item: -item[1].seconds))
        for at in (0, 1)
    )
    return layer, outside


def cost_of(log: LaunchLog) -> Cost:
    return cost_of_launches(log.launches)._replace(kept_bytes=log.peak)


def cost_of_launches(launches: Sequence[Launch]) -> Cost:
    times = [[seconds(each, flash) for each in launches] for flash in (FLASH_FLOPS, FLASH_3_FLOPS)]
    return Cost(sum(counts(launches).values()), sum(each.bytes for each in launches), sum(times[0]), sum(times[1]))


def seconds(launch: Launch, flash: float) -> float:
    """Return the estimated duration of a launch on an H200."""
    compute = flops(launch) / GEMM_FLOPS + flash_flops(launch) / flash
    return max(compute, launch.bytes / COPY_BYTES, LEAST_S)


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
        case "step_expand":
            # Each expert has equally many rows, each of which is multiplied once.
            pairs, weights = int(launch.args[6][1]), launch.args[1]
            return 2.0 * pairs * len(weights) * size(weights[0][1:])
        case "lora_expand_back":
            return sum(2.0 * size(g) * int(w[1]) for g, w in zip(*launch.args[:2], strict=True))
        case "mm" | "bmm" | "linear" | "addmm_":
            left, right = shapes[-2:]
            return 2.0 * size(left) * int(right[0 if launch.name == "linear" else -1])
        case _:
            return 0.0


def size(shape: Sequence[int]) -> int:
    return prod(shape)


def flash_flops(launch: Launch) -> float:
    """Return the FLOP of causal attention, half of the square: 2 S H D per token, 2.5 times that for backward."""
    if not launch.name.startswith("_varlen_attn"):
        return 0.0
    is_back = launch.name.endswith("backward")
    longest = next(each for each in launch.args if type(each) is int)
    return 2.0 * size(launch.args[1 if is_back else 0]) * longest * (2.5 if is_back else 1.0)


def train(shape: Shape, layers: int, settings: Args) -> tuple[FakeEngine, LaunchLog]:
    """Run one pass and one optimizer step of every tenant; return the engine with the log of the pass, and that of the step."""
    fake, step = FakeEngine(shape, layers, settings), LaunchLog()
    runs = [f"r{at}" for at in range(settings.tenants)]

    def work(engine: Engine) -> None:
        begin(engine, fake, runs, settings.rank)
        with fake.log:
            found = engine.run([a_pass(run, settings.length) for run in runs])
        with step:
            stepped = engine.run([OptimStep(run, 2, 1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0) for run in runs])
        for output in (*found.outputs.values(), *stepped.outputs.values()):
            assert not isinstance(output, Failure), output

    on_fake_device(fake, work)
    return fake, step


def decode(shape: Shape, layers: int, settings: Args) -> FakeEngine:
    """Run one decode step of `rows` sequences over `adapters` adapters.

    It is the step that a graph captures.
    """
    fake, rows = FakeEngine(shape, layers, settings), settings.rows
    pages = -(-settings.context // PAGE)

    def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=DEVICE)

    def work(engine: Engine) -> None:
        base = engine._base
        cache = KvCache(base.kv, rows * pages, PAGE, DEVICE, BF16)
        lengths, table = (zeros(*each, dtype=torch.int32) for each in ((rows,), (rows, pages)))
        tables = graph_tables(zeros(rows), lengths, table, cache)
        siblings = {target.name: own for own in siblings_of(base.targets) for target in own.targets}
        table = zeros(len(FAMILIES), 1 + rows, 4)
        most = [settings.adapters] * len(FAMILIES)  # at most 16 rows of each, so a tile
        lora = KernelLora(siblings, base.router.linears, LoraTables(table, most, padded_rank(settings.rank)))
        experts = None
        if isinstance(shape, Mixture):
            layout = slot_layout(base.targets, settings.rank)
            pool = Pool(layout, zeros(settings.adapters, layout.size, dtype=BF16))
            slots = [Slot(pool, at, frozenset(layout.target_by_name)) for at in range(settings.adapters)]
            of_rows = [slots[at * len(slots) // rows] for at in range(rows)]
            experts = experts_of_step(units_of(base.targets), of_rows, [False] * rows, rows, DEVICE)
        route = MixedStep(KernelAttention(cache, tables), lora, experts=experts)
        fake.reads.clear()
        fake.log.launches.clear()
        with torch.no_grad(), fake.log:
            model_runner.run_model(base, zeros(1, rows), zeros(1, rows), route)

    on_fake_device(fake, work)
    return fake
