"""Rates of the parts of a decode step, for the modules of one Qwen3 layer, by CUDA graphs.

A graph leaves out the host's time to start launches. Layers are computed one after the other, because the matrices of
one layer would stay in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from bench.support.model import Shape
from cotrain_workers.engine.decoding.kv_cache import KvCache
from cotrain_workers.engine.decoding.lora_kernel import (
    FAMILIES,
    LoraTables,
    Siblings,
    expand,
    lora_tables,
    shrink,
    siblings_of,
)
from cotrain_workers.engine.decoding.page_kernel import KernelAttention, graph_tables
from cotrain_workers.engine.decoding.slot_pool import Pool, Slot, slot_layout
from cotrain_workers.engine.model.configuration import KvShape
from cotrain_workers.engine.routing import AttentionRule
from cotrain_workers.engine.spec import Target

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS, ROWS, CONTEXT, PAGE, RANK = 8, 128, 1024, 256, 16
BF16 = torch.bfloat16


def seconds(work: Callable[[], object]) -> float:
    """Return the mean time of one call in a graph."""
    import triton

    return float(triton.testing.do_bench_cudagraph(work, rep=20)) / 1e3


def targets_of(shape: Shape, layer: int = 0) -> list[Target]:
    """Return the linear modules of one layer."""
    return [
        Target(f"{layer}.{'mlp' if at > 3 else 'self_attn'}.{name}", "mlp" if at > 3 else "attn", *sizes)
        for at, (name, sizes) in enumerate(zip(NAMES, shape.linears, strict=True))
    ]


def decode_rates(shape: Shape, adapters: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield time and rate of LoRA and of the base model's products, by modules that read one `x`; then of attention.

    GB/s count matrices once for each adapter, rows once, and outputs twice where they are added to.
    """
    targets = [target for layer in range(LAYERS) for target in targets_of(shape, layer)]
    layout = slot_layout(targets, RANK)
    pool = Pool(layout, torch.randn(adapters, layout.size, device=device, dtype=BF16) / 8)
    slots = [Slot(pool, at, frozenset(layout.target_by_name)) for at in range(adapters)]
    tables = lora_tables([slots[row * adapters // ROWS] for row in range(ROWS)], device)
    groups = list(siblings_of(targets))
    for number in range(len(groups) // LAYERS):
        same = groups[number :: len(groups) // LAYERS]
        name = "+".join(target.name.split(".")[-1].removesuffix("_proj") for target in same[0].targets)
        yield {"rows": ROWS, "adapters": adapters, "modules": name, **rates_of(same, tables, adapters, device)}
    yield {"rows": ROWS, "context": CONTEXT, **attention_rate(shape, device)}


def rates_of(same: list[Siblings], tables: LoraTables, adapters: int, device: torch.device) -> dict[str, float]:
    """Return us and GB/s of one launch over the same modules of all layers."""
    inputs, widths = same[0].targets[0].inputs, [target.outputs for target in same[0].targets]
    x = torch.randn(ROWS, inputs, device=device, dtype=BF16)
    ys = [torch.zeros(ROWS, width, device=device, dtype=BF16) for width in widths]
    weights = [torch.randn(LAYERS, width, inputs, device=device, dtype=BF16) for width in widths]
    family = FAMILIES.index(same[0].targets[0].family)
    tiles, most = tables.tiles[family], tables.most[family]
    sums = shrink(x, tiles, most, tables.largest, same[0].of_a)

    def all_shrink() -> None:
        for own in same:
            shrink(x, tiles, most, tables.largest, own.of_a)

    def all_expand() -> None:
        for own in same:
            expand(x, sums, ys, tiles, most, own.of_b)

    def all_products() -> None:
        for layer in range(LAYERS):
            for weight in weights:
                functional.linear(x, weight[layer])

    item, of_y = BF16.itemsize, 2 * sum(y.nbytes for y in ys)
    work = {
        "shrink": (all_shrink, adapters * RANK * inputs * len(widths) * item + x.nbytes),
        "expand": (all_expand, adapters * RANK * sum(widths) * item + of_y),
        "base": (all_products, sum(widths) * inputs * item + x.nbytes + of_y // 2),
    }
    took = {name: seconds(run) / LAYERS for name, (run, _) in work.items()}
    rates = {f"{name}_gb_s": size / took[name] / 1e9 for name, (_, size) in work.items()}
    return {f"{name}_us": time * 1e6 for name, time in took.items()} | rates


def attention_rate(shape: Shape, device: torch.device) -> dict[str, float]:
    """Return us and GB/s of keys and values of one layer's attention, with the write of the new ones."""
    pages = CONTEXT // PAGE
    cache = KvCache(KvShape(1, shape.kv_heads, shape.head), ROWS * pages, PAGE, device, BF16)
    table = torch.arange(ROWS * pages, dtype=torch.int32, device=device).view(ROWS, pages)
    kv_slots = torch.arange(1, ROWS + 1, device=device) * CONTEXT - 1
    lengths = torch.full((ROWS,), CONTEXT, dtype=torch.int32, device=device)
    attention = KernelAttention(cache, graph_tables(kv_slots, lengths, table, cache))
    q, k, v = (
        torch.randn(ROWS, heads, shape.head, device=device, dtype=BF16)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    took = seconds(lambda: attention.attend(0, q, k, v, AttentionRule(shape.head**-0.5, None, None)))
    size = 2 * ROWS * CONTEXT * shape.kv_heads * shape.head * BF16.itemsize
    return {"attention_us": took * 1e6, "attention_gb_s": size / took / 1e9}
