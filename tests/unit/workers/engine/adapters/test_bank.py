from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cotrain_workers.engine.adapters.adapter import initial_weights
from cotrain_workers.engine.adapters.bank import (
    GIB,
    AdapterBank,
    AdapterSize,
    Moves,
    adapter_budget,
    device_groups,
    moves_for,
    over_budget,
    prefetch_moves,
)
from cotrain_workers.engine.spec import AdapterSpec, Target, plan_layout

TARGETS = (
    Target("layers.0.q_proj", "attn", 48, 32),
    Target("layers.0.up_proj", "mlp", 48, 100),
    Target("lm_head", "unembed", 48, 77),
)


def weights_of(spec: AdapterSpec) -> dict[str, torch.Tensor]:
    layout = plan_layout(spec, TARGETS)
    return {name: pair.a for name, pair in layout.views(initial_weights(spec, layout)).items()}


def test_a_is_kaiming_uniform_and_b_is_zero() -> None:
    spec = AdapterSpec(32, seed=3)
    layout = plan_layout(spec, TARGETS)

    for pair in layout.views(initial_weights(spec, layout)).values():
        bound = 1 / math.sqrt(48)
        assert not pair.b.any()
        assert pair.a.abs().max() <= bound
        assert pair.a.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_the_values_of_a_module_depend_only_on_seed_and_name() -> None:
    everything = weights_of(AdapterSpec(4, seed=3))
    head_only = weights_of(AdapterSpec(4, seed=3, train_attn=False, train_mlp=False))

    assert set(head_only) == {"lm_head"}
    assert torch.equal(head_only["lm_head"], everything["lm_head"])
    assert not torch.equal(weights_of(AdapterSpec(4, seed=4))["lm_head"], everything["lm_head"])
    assert not torch.equal(everything["layers.0.q_proj"], everything["lm_head"])


def test_matrices_do_not_overlap_and_start_on_a_cache_line() -> None:
    layout = plan_layout(AdapterSpec(5, seed=0), TARGETS)
    owners = torch.zeros(layout.size)

    for pair in layout.views(owners).values():
        for matrix in pair:
            assert matrix.storage_offset() % 16 == 0
            matrix.add_(1)

    assert owners.max() == 1
    assert owners.sum() == layout.trainable_parameters == 5 * sum((80, 148, 125))


def test_alpha_does_not_depend_on_the_rank() -> None:
    assert AdapterSpec(8, seed=0).scale == 4.0
    assert AdapterSpec(64, seed=0).scale == 0.5


@pytest.mark.parametrize("field", ["weights", "grads", "m", "v", "step", "grads_pending", "spec"])
def test_a_digest_depends_on_every_part_of_a_state(field: str) -> None:
    bank = AdapterBank(TARGETS, torch.device("cpu"), torch.float32)
    bank.create("a", AdapterSpec(4, seed=0))
    state = bank.state("a")
    value: Any = getattr(state, field)
    changed: Any
    if isinstance(value, torch.Tensor):
        changed = value.clone()
        changed[-1] += 1e-7
    else:
        changed = AdapterSpec(4, seed=1) if field == "spec" else value + 1

    assert replace(state, **{field: changed}).digest() != state.digest()
    assert bank.state("a").digest() == state.digest()


def test_a_version_is_never_used_for_other_weights() -> None:
    bank = AdapterBank(TARGETS, torch.device("cpu"), torch.bfloat16)
    first = bank.create("a", AdapterSpec(4, seed=0))
    seen = {first.version}
    first.weights_changed()
    seen.add(first.version)
    bank.drop("a")
    seen.add(bank.create("a", AdapterSpec(4, seed=1)).version)

    assert len(seen) == 3


def test_the_compute_copy_is_made_on_demand_and_again_after_a_change() -> None:
    adapter = AdapterBank(TARGETS, torch.device("cpu"), torch.bfloat16).create("a", AdapterSpec(4, seed=0))
    assert adapter._compute is None
    before = adapter.compute["lm_head"].b
    assert adapter.compute["lm_head"].b is before

    adapter.layout.views(adapter.weights)["lm_head"].b.fill_(2.0)
    assert not before.any()
    adapter.weights_changed()
    assert (adapter.compute["lm_head"].b == 2.0).all()


def test_an_offloaded_adapter_uses_no_device_memory() -> None:
    bank = AdapterBank(TARGETS, torch.device("cpu"), torch.bfloat16, adapter_bytes=1)
    adapter = bank.create("a", AdapterSpec(4, seed=0))
    assert adapter.compute
    assert adapter.gradient.views

    bank.create("b", AdapterSpec(4, seed=0))

    assert adapter.on_host is not None
    assert (adapter.arenas, adapter._compute, adapter._gradient) == ({}, None, None)
    assert set(adapter.on_host.blocks_by_arena) == {"weights", "m", "v"}


def sizes(on_device: str, on_host: str = "") -> list[AdapterSize]:
    """Return adapters of one byte each, the least recently used first."""
    return [AdapterSize(run, 1, is_on_device=run in on_device) for run in (*on_host, *on_device)]


def test_a_needed_adapter_replaces_the_least_recently_used_one() -> None:
    assert moves_for(sizes("abcd", "e"), ["e", "a"], 4) == Moves(["b"], ["e"])


def test_no_adapter_moves_while_all_fit() -> None:
    assert moves_for(sizes("abc", "e"), ["e"], 4) == Moves([], ["e"])
    assert moves_for(sizes("abc", "e"), ["a"], 4) == Moves([], [])
    assert moves_for(sizes("abcdefgh"), ["a"], None) == Moves([], [])


def test_needed_adapters_are_loaded_even_beyond_the_budget() -> None:
    assert moves_for(sizes("a", "bcd"), ["b", "c", "d"], 2) == Moves(["a"], ["b", "c", "d"])


def test_a_budget_exceeded_by_new_runs_is_restored() -> None:
    assert moves_for(sizes("abcd"), ["d"], 2) == Moves(["a", "b"], [])


def test_adapters_of_the_next_cycles_are_prefetched_as_far_as_they_fit() -> None:
    adapters = sizes("abcd", "efg")

    assert prefetch_moves(adapters, ["e", "f", "g"], in_use="cd", budget=4) == Moves(["a", "b"], ["e", "f"])
    assert prefetch_moves(adapters, ["e"], in_use="abcd", budget=4) == Moves([], [])
    assert prefetch_moves(adapters, ["e"], in_use="", budget=0) == Moves([], [])
    assert prefetch_moves(adapters, ["c", "unknown", "e"], in_use="", budget=4) == Moves(["a"], ["e"])


def test_a_cycle_is_divided_only_if_its_adapters_do_not_fit() -> None:
    sizes = {"a": 2, "b": 2, "c": 3, "d": 1}

    assert device_groups(list("abcd"), sizes, None) == [list("abcd")]
    assert device_groups(list("abcd"), sizes, 8) == [list("abcd")]
    assert device_groups(list("abcd"), sizes, 4) == [["a", "b"], ["c", "d"]]
    assert device_groups(list("abcd"), sizes, 1) == [["a"], ["b"], ["c"], ["d"]]
    assert device_groups(["unknown"], {}, 1) == [["unknown"]]
    assert device_groups([], {}, 1) == [[]]


def test_the_minimum_of_least_recently_used_adapters_is_removed() -> None:
    sizes = {"a": 3, "b": 3, "c": 3}

    assert over_budget(sizes, 9) == []
    assert over_budget(sizes, 8) == ["a"]
    assert over_budget(sizes, 5) == ["a", "b"]
    assert over_budget(sizes, None) == []


@pytest.mark.parametrize("noise", [0, 1 << 20])
def test_the_adapter_budget_of_a_gpu_is_the_same_after_a_restart(noise: int) -> None:
    # H200 and Qwen3-8B in bf16.
    assert adapter_budget(150_000_000_000, 16_400_000_000 + noise) == 24 * GIB


def test_a_full_gpu_keeps_memory_for_an_adapter() -> None:
    assert adapter_budget(16 * GIB, 15 * GIB) == GIB
