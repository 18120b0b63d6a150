from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from cotrain_workers.engine.adapters.adapter import is_all_finite
from cotrain_workers.engine.decoding import adapter_slots, step
from cotrain_workers.engine.decoding.adapter_slots import WeightSlots, WeightsNotFinite, WeightsUnfit
from cotrain_workers.engine.decoding.slot_pool import Slot, slot_layout
from cotrain_workers.engine.decoding.step import LONG_RUN, RowLora
from cotrain_workers.engine.ops import HostWeights, WeightsMissing
from cotrain_workers.engine.spec import AdapterSpec, Target, plan_layout

TARGETS = (Target("q_proj", "attn", 24, 40), Target("up_proj", "mlp", 24, 33), Target("lm_head", "unembed", 24, 131))


def host(rank: int, seed: int = 0, **families: Any) -> HostWeights:
    spec = AdapterSpec(rank, seed=seed, **families)
    size = plan_layout(spec, TARGETS).size
    return HostWeights(spec, torch.randn(size, generator=torch.Generator().manual_seed(seed)))


def slots_of(stored: Mapping[str, HostWeights], capacity: int | None = None) -> WeightSlots:
    """Return a cache for some adapters of rank 8."""
    one = slot_layout(TARGETS, 8).size * 4
    limit = None if capacity is None else capacity * one
    loads.clear()

    def load(key: str) -> HostWeights:
        loads.append(key)
        if key not in stored:
            raise WeightsMissing(key)
        return stored[key]

    return WeightSlots(TARGETS, torch.device("cpu"), torch.float32, load, limit)


loads: list[str] = []


def product(slot: Slot | None) -> torch.Tensor:
    """Return the LoRA output of one adapter for fixed rows."""
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(7))
    found = torch.zeros(3, 131)
    RowLora([slot] * 3, torch.device("cpu")).add("lm_head", x, found)
    return found


def test_ranks_up_to_a_power_of_two_share_a_pool() -> None:
    ranks = (1, 8, 9, 16, 40, 64, 100)
    assert [slot_layout(TARGETS, rank).rank for rank in ranks] == [8, 8, 16, 16, 64, 64, 128]


@pytest.mark.parametrize("rank", [1, 5, 8, 20])
@pytest.mark.parametrize("target", TARGETS)
def test_a_slot_computes_what_its_adapter_computes(rank: int, target: Target) -> None:
    weights = host(rank)
    slot = slots_of({"a": weights}).pin("a")
    pair = plan_layout(weights.spec, TARGETS).views(weights.flat)[target.name]
    x = torch.randn(40, target.inputs)

    for rows in (3, 40):
        found = torch.zeros(rows, target.outputs)
        RowLora([slot] * rows, torch.device("cpu")).add(target.name, x[:rows], found)
        expected = weights.spec.scale * x[:rows] @ pair.a.t() @ pair.b.t()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_have_the_same_bits_in_any_mix() -> None:
    stored = {str(at): host(rank, at) for at, rank in enumerate((8, 5, 8, 1, 20, 16, 8))}
    slots = slots_of(stored)
    pinned = [slots.pin(key) for key in stored]
    x = torch.randn(256, 24)
    for target in TARGETS:
        for slot in pinned:
            long = torch.zeros(LONG_RUN, target.outputs)
            RowLora([slot] * LONG_RUN, torch.device("cpu")).add(target.name, x[:LONG_RUN], long)
            mixed = [*pinned, *[slot] * 3, *reversed(pinned)]
            at = len(pinned)
            rows = torch.cat([x[50 : 50 + at], x[:3], x[100 : 100 + at]])
            found = torch.zeros(len(mixed), target.outputs)
            RowLora(mixed, torch.device("cpu")).add(target.name, rows, found)
            torch.testing.assert_close(found[at : at + 3], long[:3], rtol=0, atol=0)


@pytest.mark.parametrize(("gather", "keep"), [(0, 0), (1 << 20, 0), (1 << 20, 1 << 20)])
def test_gathering_and_keeping_matrices_changes_no_bit(monkeypatch: pytest.MonkeyPatch, gather: int, keep: int) -> None:
    slots = slots_of({str(at): host(8, at) for at in range(5)})
    pinned = [slots.pin(str(at)) for at in range(5)]
    x, expected = torch.randn(5, 24), torch.zeros(5, 131)
    RowLora(pinned, torch.device("cpu")).add("lm_head", x, expected)

    monkeypatch.setattr(step, "GATHER_BYTES", gather)
    monkeypatch.setattr(step, "KEEP_BYTES", keep)
    lora = RowLora(pinned, torch.device("cpu"))
    for _ in range(2):
        found = torch.zeros(5, 131)
        lora.add("lm_head", x, found)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        lora.add("q_proj", x, torch.zeros(5, 40))


def test_modules_that_an_adapter_does_not_train_are_unchanged() -> None:
    stored = {"a": host(8, train_mlp=False), "b": host(8, 1)}
    slots = slots_of(stored)
    a, b = slots.pin("a"), slots.pin("b")
    x, y = torch.randn(4, 24), torch.zeros(4, 33)

    RowLora([a, a, b, None], torch.device("cpu")).add("up_proj", x, y)

    assert not y[[0, 1, 3]].any()
    assert y[2].any()


def test_the_least_recently_used_slot_is_evicted_unless_it_is_in_use() -> None:
    stored = {key: host(8, at) for at, key in enumerate("abcd")}
    slots = slots_of(stored, capacity=2)
    slots.pin("a")
    slots.pin("b")
    assert slots.pin("c") is None
    assert slots.pin("c") is None
    assert loads == ["a", "b", "c"]  # c waits in host memory

    slots.unpin("b")
    assert slots.pin("c") is not None
    slots.unpin("a")
    assert slots.pin("d") is not None

    assert slots.pin("a") is None
    assert loads == ["a", "b", "c", "d", "a"]


def test_a_cached_adapter_is_not_loaded_again() -> None:
    slots = slots_of({"a": host(8)})
    first = slots.pin("a")
    slots.unpin("a")

    assert slots.pin("a") is first
    assert loads == ["a"]


def test_unused_pools_are_freed_for_another_rank() -> None:
    stored = {"a": host(8), "b": host(8, 1), "large": host(16)}
    slots = slots_of(stored, capacity=3)
    slots.pin("a")
    slots.pin("b")
    slots.unpin("a")
    slots.unpin("b")

    assert slots.pin("large", at_once=True) is not None
    slots.unpin("large")
    assert slots.pin("a", at_once=True) is not None


def test_recently_used_slots_are_not_freed_for_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of({"a": host(8), "large": host(16)}, capacity=2)
    slots.pin("a")
    slots.unpin("a")
    assert slots.pin("large") is None
    assert len(slots.filled()) == 1

    monkeypatch.setattr(adapter_slots, "KEPT_S", 0.0)
    assert slots.pin("large") is not None
    assert len(slots.filled()) == 1


def test_a_pool_in_use_frees_its_unused_slots_for_another_rank() -> None:
    """It frees the minimum, least recently used first. Moved adapters compute the same bits."""
    stored = {key: host(8, at) for at, key in enumerate("abcdefghij")} | {"large": host(16, 99)}
    slots = slots_of(stored, capacity=10)
    small = {key: slots.pin(key) for key in "abcdefghij"}
    for key in "acdefghi":
        slots.unpin(key)
    before = {key: product(slot) for key, slot in small.items()}

    large = slots.pin("large", at_once=True)

    assert slots.filled() == [*map(small.get, "bdefghij"), large]
    for key in "bdefghij":
        assert torch.equal(product(small[key]), before[key])
    assert torch.equal(product(large), product(slots_of(stored).pin("large")))
    assert slots.pin("f") is small["f"]
    assert slots.pin("a", at_once=True) is not None  # in the place of d, which is not in use
    assert slots.filled()[0] is small["b"]


def test_no_slot_is_freed_for_another_rank_if_that_is_not_enough() -> None:
    slots = slots_of({"a": host(8), "b": host(8, 1), "large": host(16)}, capacity=2)
    slots.pin("a")
    slots.pin("b")
    slots.unpin("b")

    assert slots.pin("large", at_once=True) is None

    assert len(slots.filled()) == 2
    assert not slots.fits_without("large", [])
    assert slots.fits_without("large", ["a"])
    assert slots.in_use() == {"a"}


def test_the_number_of_remembered_waiting_weights_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_slots, "MAX_WAITING", 3)
    slots = slots_of({str(at): host(8, at) for at in range(10)}, capacity=1)
    slots.pin("0")
    for at in range(1, 10):
        assert slots.pin(str(at)) is None
        assert slots.rivals(str(at)) == {"0"}
        assert len(slots._waiting) <= 3
    slots.unpin("0")
    assert slots.pin("1") is not None


def test_an_adapter_larger_than_the_cache_is_served_alone() -> None:
    slots = slots_of({"a": host(64), "b": host(32)}, capacity=0)
    assert slots.pin("a") is not None
    assert slots.pin("b", at_once=True) is None

    slots.unpin("a")

    assert slots.pin("b", at_once=True) is not None


def test_dropped_weights_are_removed_unless_they_are_in_use() -> None:
    slots = slots_of({"a": host(8)})
    slots.pin("a")
    slots.drop("a")
    assert len(slots.filled()) == 1

    slots.unpin("a")
    slots.drop("a")
    slots.drop("unknown")

    assert slots.filled() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_every_time(value: float) -> None:
    bad = host(8)
    bad.flat[3] = value
    slots = slots_of({"a": bad})

    for _ in range(2):
        with pytest.raises(WeightsNotFinite):
            slots.pin("a")


def test_weights_of_another_model_are_refused() -> None:
    bad = replace(host(8), flat=torch.zeros(7))

    with pytest.raises(WeightsUnfit, match="The weights hold 7 values, not"):
        slots_of({"a": bad}).pin("a")


def test_64_adapters_of_rank_16_fit_by_default() -> None:
    slots = slots_of({str(at): host(16, at) for at in range(64)})

    assert all(slots.pin(str(at)) is not None for at in range(64))


def test_unknown_weights_are_missing() -> None:
    with pytest.raises(WeightsMissing):
        slots_of({}).pin("a")


def test_waiting_weights_are_checked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of({key: host(8, seed) for seed, key in enumerate("ab")}, capacity=1)
    slots.pin("a")
    looks: list[int] = []

    def noted(values: torch.Tensor) -> torch.Tensor:
        looks.append(len(values))
        return is_all_finite(values)

    monkeypatch.setattr(adapter_slots, "is_all_finite", noted)
    assert [slots.pin("b") for _ in range(3)] == [None] * 3
    slots.unpin("a")
    assert slots.pin("b") is not None

    assert (len(looks), loads) == (1, ["a", "b"])
