"""Backend `grouped` compared with `seg`, on CPU, where torch computes one group after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from cotrain_workers.engine.lora import grouped
from cotrain_workers.engine.lora import self_check as lora_self_test
from cotrain_workers.engine.lora.grouped import (
    GroupedLora,
    StackedWeights,
    find_groups,
    find_rounds,
    padded_rank,
    plan_stack,
    stack_class,
    views_at,
)
from cotrain_workers.engine.lora.segmented import SegmentLora
from cotrain_workers.engine.lora.self_check import SPECS, RandomAdapter, random_adapter, segments_of
from cotrain_workers.engine.ops import Create, Pass
from cotrain_workers.engine.routing import Segment
from cotrain_workers.engine.spec import AdapterSpec, Layout, Pair, Target, plan_layout
from tests.support.draws import variant
from tests.support.engine_checks import gradient_passes, mixed_against_alone, parity_with_peft, warmed_up
from tests.support.tiny_models import build_tiny
from tests.support.training import MIX, ModelFolder, NewEngine, random_datum, relative_error

CPU = torch.device("cpu")
LENGTHS = (1, 9, 40, 8, 30, 70)
ROWS = 192


def adapters(dtype: torch.dtype = torch.float32) -> list[RandomAdapter]:
    generator = torch.Generator().manual_seed(3)
    return [random_adapter(spec, CPU, dtype, generator) for spec in SPECS]


def came_out(backend: str, segments: Sequence[Segment], rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    lora = SegmentLora(segments) if backend == "seg" else GroupedLora(segments, rows, dtype)
    names, values = lora_self_test.run(lora, segments, rows, CPU, dtype)
    return dict(zip((f"{at} {name}" for at, name in enumerate(names)), values, strict=True))


@pytest.mark.parametrize("rows", [ROWS, 184])  # without and with filler after the last segment
def test_grouped_equals_seg_for_any_ranks_and_targets(rows: int) -> None:
    sources = adapters()
    expected = came_out("seg", segments_of(sources, LENGTHS), rows, torch.float32)
    found = came_out("grouped", segments_of(sources, LENGTHS), rows, torch.float32)

    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert values.abs().max() > 0
        assert relative_error(found[name], values) < 1e-6, name  # another order of summation


def test_gradients_in_bf16_have_the_direction_of_seg_in_fp32() -> None:
    narrow = came_out("grouped", segments_of(adapters(torch.bfloat16), LENGTHS), ROWS, torch.bfloat16)
    wide = came_out("seg", segments_of(adapters(), LENGTHS), ROWS, torch.float32)

    for name, values in wide.items():
        cosine = torch.cosine_similarity(narrow[name].flatten(), values.flatten(), dim=0)
        assert cosine > 0.999, name


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of groups of each grouped product."""
    groups: list[int] = []
    real = functional.grouped_mm

    def counted(*args: Any, offs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        groups.append(len(offs))
        return real(*args, offs=offs, **kwargs)

    monkeypatch.setattr(functional, "grouped_mm", counted)
    return groups


def same_class(count: int) -> tuple[list[RandomAdapter], list[Segment]]:
    generator = torch.Generator().manual_seed(5)
    sources = [random_adapter(AdapterSpec(4, 0), CPU, torch.float32, generator) for _ in range(count)]
    segments = []
    for at, each in enumerate(sources):
        grads = each.layout.views(torch.zeros_like(each.weights))
        segments.append(Segment(8 * at, 8 * at + 3, each, 2.0, grads))
    return sources, segments


def test_the_number_of_products_does_not_depend_on_that_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_products(monkeypatch)
    numbers = []
    for adapters_at_once in (1, 50):
        counts.clear()
        _, segments = same_class(adapters_at_once)
        came_out("grouped", segments, 8 * adapters_at_once + 8, torch.float32)
        numbers.append(len(counts))

    # For q, k and v, and for two MLPs: one A product for modules with the same input, and two
    # backward for each forward.
    assert numbers == [3 * ((1 + 3) + 2 * (2 + 3))] * 2


def test_more_segments_than_groups_are_several_products(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grouped.MAX_SEGMENTS + 1 <= 1023  # the limit of torch; one group is filler
    monkeypatch.setattr(grouped, "MAX_SEGMENTS", 30)
    counts = count_products(monkeypatch)
    _, segments = same_class(70)
    found = came_out("grouped", segments, 8 * 70, torch.float32)
    assert max(counts) <= 31

    _, segments = same_class(70)
    expected = came_out("seg", segments, 8 * 70, torch.float32)
    assert all(relative_error(found[name], expected[name]) < 1e-6 for name in expected)


def test_a_neighbour_full_of_nan_changes_no_bit() -> None:
    clean = segments_of(adapters(), LENGTHS)
    broken = segments_of(adapters(), LENGTHS)
    failing = broken[2]
    failing.source.weights.fill_(torch.nan)

    expected = came_out("grouped", clean, ROWS, torch.float32)
    found = came_out("grouped", broken, ROWS, torch.float32)

    rows = torch.ones(ROWS, dtype=torch.bool)
    rows[failing.start : -(-failing.stop // 8) * 8] = False  # its filler has no owner
    for name, values in expected.items():
        if "output" in name or "gradient of x" in name:
            assert torch.equal(found[name][0, rows], values[0, rows]), name
    assert found["0 output of 0.self_attn.q_proj"].isnan().any()
    for ours, theirs in zip(broken, clean, strict=True):
        assert ours.grads is not None
        assert theirs.grads is not None
        same = [torch.equal(ours.grads[name].a, theirs.grads[name].a) for name in ours.grads]
        assert all(same) == (ours is not failing)


def test_two_slices_of_one_op_are_added_one_after_the_other() -> None:
    _, segments = same_class(3)
    again = replace(segments[0], start=24, stop=30)

    assert [[at for at, _ in each_round] for each_round in find_rounds([*segments, again])] == [[0, 1, 2], [3]]

    no_grads = [replace(segment, grads=None) for segment in segments]
    assert find_rounds(no_grads) == []


def test_two_ops_of_one_adapter_share_its_copy() -> None:
    _, segments = same_class(2)
    own = [replace(segments[0], start=8 * at, stop=8 * at + 8) for at in range(3)]
    other = replace(segments[1], start=24, stop=30)

    (groups,) = find_groups([*own, other], 40, torch.float32)

    assert groups.slots == [0, 0, 0, 1]
    assert groups.adapter_ends.tolist() == [24, 32, 40]
    assert groups.segment_ends.tolist() == [8, 16, 24, 32]


@pytest.mark.parametrize("family", ["qwen3", variant("qwen2"), variant("gemma2")])
def test_a_mixed_cycle_equals_plain_peft(model_folder: ModelFolder, family: str) -> None:
    parity = parity_with_peft(model_folder(family), "cpu", torch.float32, "grouped")

    assert parity.gradient_error < 1e-5
    assert parity.logprob_error < 1e-5
    assert parity.loss_error < 1e-5


@pytest.mark.parametrize("hidden", [variant(64), 72])
def test_a_run_among_others_equals_the_run_alone_exactly(tmp_path: Path, hidden: int) -> None:
    folder = build_tiny("qwen3", tmp_path, hidden=hidden, vocab=131)

    assert mixed_against_alone(folder, "cpu", torch.float32, "grouped").is_bit_equal


def test_the_whole_engine_has_the_gradients_of_seg(model_folder: ModelFolder, new_engine: NewEngine) -> None:
    seg = warmed_up(model_folder("qwen3"), "cpu", torch.float32, "seg")
    grouped = new_engine(lora_backend="grouped")
    for tenant in MIX:
        grouped.adapters.restore(tenant.run, seg.adapters.state(tenant.run))

    for engine in (seg, grouped):
        engine.run(gradient_passes())

    for tenant in MIX:
        ours, theirs = (engine.adapters.state(tenant.run).grads for engine in (grouped, seg))
        assert relative_error(ours, theirs) < 1e-5  # an error of 1e-7 grows through the layers


def test_the_weights_are_in_memory_only_once(new_engine: NewEngine) -> None:
    engine = new_engine(lora_backend="grouped", dtype=torch.bfloat16)
    engine.run([op for tenant in MIX for op in tenant.ops(0)])

    assert all(engine.adapters[tenant.run]._compute is None for tenant in MIX)


def test_an_op_of_two_slices_in_one_micro_batch_has_both_gradients(new_engine: NewEngine) -> None:
    rng = np.random.default_rng(0)
    datums = [random_datum(rng, "cross_entropy", 9, columns=columns) for columns in (0, 2)]
    states = []
    for lora in ("seg", "grouped"):
        engine = new_engine(lora_backend=lora)
        create = Create("a", 0, AdapterSpec(4, seed=0))
        engine.run([create, Pass("a", 1, datums, "cross_entropy", {}, needs_grad=True)])
        states.append(engine.adapters.state("a").grads)

    assert relative_error(states[1], states[0]) < 1e-5


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


def test_modules_that_read_the_same_input_are_adjacent() -> None:
    siblings = plan_stack(16, TARGETS).siblings

    assert siblings["1.self_attn.k_proj"] == tuple(f"1.self_attn.{x}_proj" for x in "qkv")
    assert siblings["0.mlp.up_proj"] == ("0.mlp.gate_proj", "0.mlp.up_proj")
    assert siblings["0.self_attn.o_proj"] == ("0.self_attn.o_proj",)
    assert siblings["0.mlp.down_proj"] == ("0.mlp.down_proj",)


def test_adapters_of_one_stack_have_one_padded_rank_and_equal_modules() -> None:
    assert [padded_rank(rank) for rank in (1, 8, 9, 16, 40, 64, 100)] == [*(8, 8, 16, 16, 64, 64, 128)]

    def kind(spec: AdapterSpec) -> tuple[int, tuple[str, ...]]:
        return stack_class(plan_layout(spec, TARGETS))

    assert kind(AdapterSpec(3, 0)) == kind(AdapterSpec(8, 1, alpha=1.0))
    assert kind(AdapterSpec(3, 0)) != kind(AdapterSpec(9, 0))
    assert kind(AdapterSpec(3, 0)) != kind(AdapterSpec(3, 0, train_mlp=False))


def test_views_are_returned_in_the_requested_order() -> None:
    flat = torch.arange(20)

    views = views_at(flat, [(10, 3), (0, 2), (5, 4)])

    assert [view.tolist() for view in views] == [[10, 11, 12], [0, 1], [5, 6, 7, 8]]
    views[0].zero_()
    assert flat[10:13].sum() == 0
