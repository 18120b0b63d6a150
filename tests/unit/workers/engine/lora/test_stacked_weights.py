from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from cotrain_workers.engine.lora.stacked_weights import (
    StackedWeights,
    padded_rank,
    plan_stack,
    stack_class,
    views_at,
)
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target, plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

TARGETS = tuple(
    Target(f"{layer}.{name}", "attn" if "self_attn" in name else "mlp", inputs, outputs)
    for layer in range(2)
    for name, inputs, outputs in (
        ("self_attn.q_proj", 24, 40),
        ("self_attn.k_proj", 24, 16),
        ("self_attn.v_proj", 24, 16),
        ("self_attn.o_proj", 40, 24),
        ("mlp.gate_proj", 24, 48),
        ("mlp.up_proj", 24, 48),
        ("mlp.down_proj", 48, 24),
    )
)


@dataclass(frozen=True)
class Kept:
    layout: Layout
    weights: torch.Tensor
    compute: Mapping[str, Pair]


def adapter(rank: int, seed: int) -> Kept:
    layout = plan_layout(AdapterSpec(rank, seed), TARGETS)
    weights = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    return Kept(layout, weights, layout.views(weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_has_every_matrix_padded_with_zeros(dtype: torch.dtype) -> None:
    adapters = [adapter(rank, seed) for seed, rank in enumerate((8, 5, 1, 8))]
    stack = StackedWeights(plan_stack(8, TARGETS), adapters, dtype)

    for target in TARGETS:
        siblings = stack.layout.siblings[target.name]
        at = siblings.index(target.name)
        a = stack.a(siblings)[:, 8 * at : 8 * (at + 1)]
        b = stack.b(target.name)
        assert (a.shape, b.shape) == ((5, 8, target.inputs), (5, 8, target.outputs))
        for slot, source in enumerate(adapters):
            rank, pair = source.layout.rank, source.compute[target.name]
            assert torch.equal(a[slot, :rank], pair.a.to(dtype))
            assert torch.equal(b[slot, :rank], pair.b.t().to(dtype))
            assert not a[slot, rank:].any()
            assert not b[slot, rank:].any()
            own = stack.pair(target.name, slot, rank)
            assert torch.equal(own.a, pair.a.to(dtype))
            assert torch.equal(own.b, pair.b.to(dtype))
        assert not a[-1].any()
        assert not b[-1].any()


def test_modules_that_read_one_x_lie_side_by_side() -> None:
    siblings = plan_stack(16, TARGETS).siblings

    assert siblings["1.self_attn.k_proj"] == tuple(f"1.self_attn.{x}_proj" for x in "qkv")
    assert siblings["0.mlp.up_proj"] == ("0.mlp.gate_proj", "0.mlp.up_proj")
    assert siblings["0.self_attn.o_proj"] == ("0.self_attn.o_proj",)
    assert siblings["0.mlp.down_proj"] == ("0.mlp.down_proj",)


def test_what_goes_into_one_stack_has_one_padded_rank_and_the_same_modules() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 9, 16, 40, 64, 100)] == [
        *(8, 8, 16, 16, 64, 64, 128)
    ]

    def kind(spec: AdapterSpec) -> tuple[int, tuple[str, ...]]:
        return stack_class(plan_layout(spec, TARGETS))

    assert kind(AdapterSpec(3, 0)) == kind(AdapterSpec(8, 1, alpha=1.0))
    assert kind(AdapterSpec(3, 0)) != kind(AdapterSpec(9, 0))
    assert kind(AdapterSpec(3, 0)) != kind(AdapterSpec(3, 0, train_mlp=False))


def test_views_come_in_the_order_they_are_asked_for() -> None:
    flat = torch.arange(20)

    views = views_at(flat, [(10, 3), (0, 2), (5, 4)])

    assert [view.tolist() for view in views] == [[10, 11, 12], [0, 1], [5, 6, 7, 8]]
    views[0].zero_()
    assert flat[10:13].sum() == 0
