"""Rates of the engine's GPU kernels one by one, next to those of torch, for the products of one Qwen3 layer.

    python -m bench kernel_rates [--size 8b] [--rows 1536,4096,8192]

With `--size 30b-a3b` the products are those of the experts, next to `grouped_mm` of torch on the same rows.

It needs a CUDA device, torch, Triton, transformers and numpy, and no model. Products are given in TFLOP/s, next to
cuBLAS on the same matrices. Products with LoRA matrices only are given in GB/s of the wide operand, which is read
once. Times are medians of `triton.testing.do_bench`, which empties the L2 cache before each call.

Then follow the parts of a decode step of 128 sequences of 1k, in us and GB/s (`bench/support/decode_rates.py`): LoRA,
the base model's products, and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from bench.support.decode_rates import NAMES, decode_rates, targets_of
from bench.support.model import MIXTURES, SHAPES, Mixture, Shape
from bench.support.record import Args, Options, Report, show
from bench.support.roofline import copy_bandwidth, matmul_flops
from cotrain_workers.engine.lora.fused.fused_experts import ExpertProducts, find_probes, sort_rows
from cotrain_workers.engine.lora.fused.fused_lora import Products
from cotrain_workers.engine.lora.fused.operators import SILU
from cotrain_workers.engine.lora.fused.tables import A, B, make_tables, plan_groups
from cotrain_workers.engine.lora.self_check import RandomAdapter
from cotrain_workers.engine.routing import ExpertWeights, Segment
from cotrain_workers.engine.spec import AdapterSpec, Target, plan_layout

RANK = 16
SEGMENTS = (1, 4, 32)
DECODE_ADAPTERS = (8, 64)
CUDA = torch.device("cuda")

OPTIONS: Options = {
    "device": "cuda", "threads": (0, "of torch; 0: its own choice"), "size": "8b", "rows": [1536, 4096, 8192],
}  # fmt: skip


def run(args: Args, report: Report) -> None:
    report["matmul_tflops"] = matmul_flops("cuda", torch.bfloat16) / 1e12
    report["copy_gb_s"] = copy_bandwidth("cuda") / 1e9
    show({name: report[name] for name in ("matmul_tflops", "copy_gb_s")})
    report["rows"] = []
    for rows in args.rows:
        for segments in SEGMENTS if rows == max(args.rows) else SEGMENTS[:1]:
            for modules, rates in rates_of_layer(args.size, rows, segments):
                report["rows"].append(show({"rows": rows, "adapters": segments, "modules": modules, **rates}))
                report.write()
    report["decode"] = []
    for adapters in DECODE_ADAPTERS if args.size in SHAPES else ():
        for row in decode_rates(SHAPES[args.size], adapters, CUDA):
            report["decode"].append(show(row))
            report.write()


def rates_of_layer(size: str, rows: int, segments: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the rates of each group of modules of a layer, or of its experts."""
    if size in MIXTURES:
        yield "experts", expert_rates(MIXTURES[size], rows, segments)
        return
    for group in groups_of(SHAPES[size], rows, segments):
        yield group.name, rates_of(group)


@dataclass(frozen=True)
class Group:
    """Modules that read the same `x`: their products, their weights, and random operands of `rows` rows."""

    name: str
    products: Products
    segments: list[Segment]  # a reference, because tables contain the addresses of their weights
    weights: list[torch.Tensor]
    x: torch.Tensor
    gys: list[torch.Tensor]
    flops: float  # of the base model's products in one direction


def groups_of(shape: Shape, rows: int, segments: int) -> Iterator[Group]:
    """Yield the groups of one layer with random values, the rows shared equally by adapters of rank 16."""
    targets = targets_of(shape)
    groups = plan_groups(targets)
    adapters = adapters_of(targets, rows, segments)
    tables = make_tables(adapters, rows, groups, CUDA)
    for group in groups:
        own = [target for target in targets if target.name in group.names]
        inputs = own[0].inputs
        yield Group(
            "+".join(target.name.split(".")[-1].removesuffix("_proj") for target in own),
            Products(group, tables),
            adapters,
            [random(target.outputs, inputs) * inputs**-0.5 for target in own],
            random(rows, inputs),
            [random(rows, target.outputs) for target in own],
            2.0 * rows * inputs * sum(target.outputs for target in own),
        )


def adapters_of(targets: Sequence[Target], rows: int, segments: int) -> list[Segment]:
    layout = plan_layout(AdapterSpec(RANK, seed=0), targets)
    found, share = [], rows // segments
    for at in range(segments):
        weights = random(layout.size)
        adapter = RandomAdapter(layout, weights, layout.views(weights))
        grads = layout.views(torch.zeros(layout.size, device=CUDA))
        found.append(Segment(at * share, (at + 1) * share, adapter, 2.0, grads))
    return found


def random(*shape: int) -> torch.Tensor:
    """Return bf16 values of a normal distribution."""
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of one call."""
    import triton

    return float(triton.testing.do_bench(work, warmup=5, rep=25, return_mode="median")) / 1e3


def rates_of(group: Group) -> dict[str, float]:
    """Return the rate of each kernel on one group: TFLOP/s, and GB/s where the name says so."""
    products, x, gys, weights = group.products, group.x, group.gys, group.weights
    low, low_grad = products.low([x], A), products.low(gys, B)
    gate = SILU if group.name == "gate+up" else 0
    gated = [random(*x.shape), random(*x.shape)] if group.name == "down" else []
    residual = random(*gys[0].shape) if len(gys) == 1 else None
    wide, wide_grad = x.nbytes, sum(gy.nbytes for gy in gys)
    took = {
        "cublas": seconds(lambda: [functional.linear(x, weight) for weight in weights]),
        "expand": seconds(lambda: products.outputs(x, weights, (), low, residual, gate)),
        "cublas_back": seconds(lambda: [gy @ w for gy, w in zip(gys, weights, strict=True)]),
        "expand_back": seconds(lambda: products.back(gys, weights, low_grad, gated, SILU if gated else 0)),
    }
    rates = {name: group.flops / time / 1e12 for name, time in took.items()}
    rates["shrink_gb_s"] = wide / seconds(lambda: products.low([x], A)) / 1e9
    rates["shrink_back_gb_s"] = wide_grad / seconds(lambda: products.low(gys, B)) / 1e9
    both = seconds(lambda: products.add_gradients(x, low, gys, low_grad))
    rates["add_gradient_gb_s"] = (wide + wide_grad) / both / 1e9
    return rates


def expert_rates(shape: Mixture, rows: int, adapters: int) -> dict[str, float]:
    """Return the rate of each kernel on the experts of one layer, with random experts for each token.

    Sorting and the narrow products are given in us.
    """
    width, inner_width, experts = shape.hidden, shape.mlp, shape.experts
    targets = [Target(f"0.mlp.experts.{name}", "mlp", width, inner_width, experts, 1, experts) for name in NAMES[-3:-1]]
    down = f"0.mlp.experts.{NAMES[-1]}"
    targets.append(Target(down, "mlp", inner_width, width, experts, experts, 1))
    groups = plan_groups(targets)
    segments = adapters_of(targets, rows, adapters)
    tables = make_tables(segments, rows, groups, CUDA)
    spans = [(each.start, each.stop) for each in segments]
    probes = find_probes(spans, rows, experts, CUDA)
    index = torch.rand(rows, experts, device=CUDA).topk(shape.chosen).indices
    sorted_rows = sort_rows(index, probes)
    first, last = (ExpertProducts(group, tables, sorted_rows) for group in groups)
    gate_up, down_w = random(experts, 2 * inner_width, width), random(experts, width, inner_width)
    base = ExpertWeights(gate_up * width**-0.5, down_w * inner_width**-0.5, SILU)
    x = random(rows, width)
    of_rows = x.index_select(0, sorted_rows.tokens)
    shares = torch.rand(len(of_rows), device=CUDA)
    low, ops = first.outer_low(x, of_rows), torch.ops.cotrain
    gate, up, inner = ops.expert_expand(of_rows, base.gate_and_up, [], SILU, low, shares, *first.of_rows)
    inner_low = last.inner_low([inner])
    ends = sorted_rows.bounds[1:, 0].contiguous()
    flops = 2.0 * len(of_rows) * width * inner_width  # of one product
    turned, both, both_w = base.gate_up.mT, [gate, up], base.gate_and_up
    expand, back = ops.expert_expand, ops.expert_expand_back
    took = {
        "grouped_mm_gate_up": (2, lambda: functional.grouped_mm(of_rows, turned, offs=ends)),
        "expand_gate_up": (2, lambda: expand(of_rows, both_w, SILU, low, shares, *first.of_rows)),
        "grouped_mm_down": (1, lambda: functional.grouped_mm(inner, base.down.mT, offs=ends)),
        "expand_down": (1, lambda: expand(inner, [base.down], [], 0, inner_low, shares, *last.of_rows)),
        "back_down": (1, lambda: back([of_rows], [base.down], both, SILU, inner_low, shares, *last.of_rows)),
        "back_gate_up": (2, lambda: back(both, both_w, [], 0, low, shares, *first.of_rows)),
    }  # fmt: skip
    rates = {name: count * flops / seconds(work) / 1e12 for name, (count, work) in took.items()}
    narrow: dict[str, Callable[[], object]] = {
        "sort_us": lambda: sort_rows(index, probes),
        "sum_us": lambda: ops.expert_sum(of_rows, None, sorted_rows.positions, shape.chosen),
        "shrink_us": lambda: last.inner_low([inner]),
        "add_gradients_us": lambda: first.add_gradients(low, both),
        "add_outer_gradients_us": lambda: first.add_outer_gradients(low, x),
    }
    return rates | {name: seconds(work) * 1e6 for name, work in narrow.items()}
