from __future__ import annotations

import pytest

from cotrain_workers.engine.adapters.residency import (
    GIB,
    AdapterSize,
    Moves,
    adapter_budget,
    device_groups,
    moves_for,
    over_budget,
    prefetch_moves,
)


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
