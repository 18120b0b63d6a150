"""Cost per layer of a training pass and a decode step: launches, bytes and kept memory, without a GPU.

    python -m bench cost [--sizes 0.6b,8b] [--tenants 4] [--length 2048] [--lora fused,seg] [--json]

The size `30b-a3b` is a mixture of experts, where `seg` takes minutes of CPU time. Each of its experts has equally
many tokens.

The engine itself runs on a CUDA device with shapes but without values (`tests/support/fake_cuda.py`, which
needs a C++ compiler). Two layer counts are compared, so the cost of any number of layers follows by scaling. The
tokens/s next to the counts are estimates at the rates of an H200 and an H100. Each launch takes as long as its FLOP or
its bytes, whichever is longer, and at least 2 us.

`of_ceiling` is the share of the most possible. A pass then only computes, at the rate of one large product. A decode
step only reads weights, keys and values once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from bench.support import roofline
from bench.support.fake_engine import BF16, DEVICE, FakeEngine, a_pass, begin, on_fake_device, run_on_fake_cuda
from bench.support.model import MIXTURES, SHAPES, Mixture, Shape
from bench.support.record import Args, Choice, Options, Report, show
from bench.support.roofline import adapter_parameters, ceiling
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

#: Rates in bf16 of products by cuBLAS and of FlashAttention 2, and the duration of the smallest kernel.
GEMM_FLOPS, FLASH_FLOPS, LEAST_S = 680e12, 290e12, 2e-6
#: Rate of one large product, measured on an H200: the ceiling.
PEAK_FLOPS = 763e12
PAGE = 256
LAYERS = (2, 3)  # with a single layer, memory would peak in the head

OPTIONS: Options = {
    "sizes": ["8b"], "tenants": 4, "length": 2048, "rank": 16, "lora": ["fused", "seg"],
    "quantization": (Choice(("none", "int8", "fp8", "nf4")), "of the base model's weights"),
    "rows": 128, "adapters": 64, "context": 1024,
    "json": (False, "print JSON, which has launches, KB and us per token of each op in training"),
}  # fmt: skip


class Rates(NamedTuple):
    """Rates of a GPU that an estimate assumes."""

    copy_bytes: float = 4.0e12  # of an H200
    own_flops: float = GEMM_FLOPS  # of this engine's products
    flash_flops: float = FLASH_FLOPS


#: Copies of an H100 are slower. Kernels of this engine may not reach the rate of cuBLAS. FlashAttention 3 needs a wheel.
RATES = {
    "h200": Rates(), "h200_own_480": Rates(own_flops=480e12), "h200_flash_3": Rates(flash_flops=520e12),
    "h100": Rates(3.0e12), "h100_own_480": Rates(3.0e12, own_flops=480e12),
}  # fmt: skip


class Cost(NamedTuple):
    """Cost of one layer, of everything outside the layers, or of a whole model."""

    launches: float
    bytes: float
    seconds: float
    kept_bytes: float = 0.0  # increase at the peak

    def with_layers(self, layer: Cost, layers: int) -> Cost:
        """Return the cost with `layers` more layers; -1 takes one away."""
        return Cost(*(a + layers * b for a, b in zip(self, layer, strict=True)))


def run(settings: Args, _: Report) -> int:
    return run_on_fake_cuda(lambda: count(settings))


def count(settings: Args) -> None:
    settings.quantization = settings.quantization or "none"
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
        yield {
            "what": "train", "size": size, "lora": name, "tenants": settings.tenants, "length": settings.length,
            "launches_per_layer": layer.launches, "kb_per_token_and_layer": layer.bytes / tokens / 1e3,
            "kept_kb_per_token_and_layer": layer.kept_bytes / tokens / 1e3,
            "peak_gb": outside.with_layers(layer, shape.layers).kept_bytes / 1e9,
            "launches_outside": outside.launches, "kb_per_token_outside": outside.bytes / tokens / 1e3,
            "launches_of_steps": cost_of(step).launches, "host_reads": reads_of(shape, one, two),
            **estimates(
                shape, tokens, partial(seconds_of_pass, one.log, two.log, shape.layers),
                partial(most_of_pass, shape, settings),
            ),
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
    one, two = (decode(shape, layers, own) for layers in LAYERS)
    layer, _ = split(cost_of(one.log), cost_of(two.log))
    ops = counts(two.log.launches)
    ops.subtract(counts(one.log.launches))
    yield {
        "what": "decode", "size": size, "rows": settings.rows, "adapters": settings.adapters,
        "launches_per_layer": layer.launches, "mb_per_layer": layer.bytes / 1e6,
        "host_reads": reads_of(shape, one, two),
        # Without the choice of tokens, and without the host's work between two steps and between launches.
        **estimates(
            shape, settings.rows, partial(seconds_of_step, shape, one.log, two.log),
            lambda rates: settings.rows * rates.copy_bytes / bytes_of_step(shape, settings),
        ),
        "ops": {op: count for op, count in ops.most_common() if count},
    }  # fmt: skip


def estimates(
    shape: Shape, count: int, seconds_of: Callable[[Rates], float], most: Callable[[Rates], float]
) -> dict[str, dict[str, float]]:
    """Return tokens/s at each of the rates, given the time of `count` tokens, and their shares of the most possible."""
    found = {"tokens_per_s": {name: count / seconds_of(rates) for name, rates in RATES.items()}}
    if not isinstance(shape, Mixture):  # of which the formulas do not count the experts
        found["of_ceiling"] = {name: found["tokens_per_s"][name] / most(rates) for name, rates in RATES.items()}
    return found


def seconds_of_pass(one: LaunchLog, two: LaunchLog, layers: int, rates: Rates) -> float:
    """Return the time of a pass of the whole model, given those of the two layer counts."""
    layer, outside = split(*(cost_of(each, rates) for each in (one, two)))
    return outside.with_layers(layer, layers).seconds


def most_of_pass(shape: Shape, settings: Args, rates: Rates) -> float:
    """Return the tokens/s of a pass that only computes at the rate of one large product."""
    tenants, length = settings.tenants, settings.length
    of_copy = roofline.Rates(PEAK_FLOPS, rates.copy_bytes)
    return ceiling(shape, length, settings.rank, of_copy, adapters=tenants, tokens=tenants * length)


def seconds_of_step(shape: Shape, one: LaunchLog, two: LaunchLog, rates: Rates) -> float:
    """Return the time of a decode step of all layers and of reading the unembedding."""
    layer, _ = split(*(cost_of(each, rates) for each in (one, two)))
    return shape.layers * layer.seconds + shape.hidden * shape.vocab * BF16.itemsize / rates.copy_bytes


def bytes_of_step(shape: Shape, settings: Args) -> float:
    """Return the bytes of weights, adapters, keys and values that a decode step must read."""
    weights = shape.layers * sum(inputs * outputs for inputs, outputs in shape.linears) + shape.hidden * shape.vocab
    adapters = settings.adapters * adapter_parameters(shape, settings.rank)
    kept = settings.rows * settings.context * 2 * shape.layers * shape.kv_heads * shape.head
    return float(BF16.itemsize * (weights + adapters + kept))


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


def cost_of(log: LaunchLog, rates: Rates = RATES["h200"]) -> Cost:
    return cost_of_launches(log.launches, rates)._replace(kept_bytes=log.peak)


def cost_of_launches(launches: Sequence[Launch], rates: Rates = RATES["h200"]) -> Cost:
    times = sum(seconds(each, rates) for each in launches)
    return Cost(sum(counts(launches).values()), sum(each.bytes for each in launches), times)


def seconds(launch: Launch, rates: Rates) -> float:
    """Return the estimated duration of a launch."""
    is_own = launch.name.startswith(("lora_", "expert_"))
    compute = flops(launch) / (rates.own_flops if is_own else GEMM_FLOPS) + flash_flops(launch) / rates.flash_flops
    return max(compute, launch.bytes / rates.copy_bytes, LEAST_S)


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
