from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
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
from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Failure, Load, Op, OptimStep, Pass, Save, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec, Target, plan_layout
from tests.support.draws import variant
from tests.support.training import MIX, NewEngine, random_datum, same_bits

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


SPEC = AdapterSpec(1, seed=0, train_mlp=False, train_unembed=False)
STEP = OptimStep("a", 9, 1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)


def adapter_bytes(engine: Engine, spec: AdapterSpec) -> int:
    """Return the fp32 bytes of an adapter that trains."""
    return 4 * 4 * engine.adapters.layout_of(spec).size


def max_on_device(engine: Engine) -> Callable[[], int]:
    """Record the maximum of arena bytes on the device at once."""
    bank, most, make = engine.adapters, [0], engine.adapters._apply

    def measured(moves: Any) -> None:
        make(moves)
        on_device = [arena for a in bank._adapter_by_run.values() for arena in a.arenas.values()]
        most[0] = max(most[0], sum(arena.nbytes for arena in on_device))

    bank._apply = measured  # type: ignore[method-assign]  # counts the bytes
    return lambda: most[0]


def fresh_state(engine: Engine, seed: int) -> AdapterState:
    """Return a state whose values depend on the seed."""
    size = engine.adapters.layout_of(SPEC).size
    arenas = torch.rand(3, size, generator=torch.Generator().manual_seed(seed)) * 0.1
    return AdapterState(SPEC, arenas[0], torch.zeros(size), arenas[1], arenas[2], 5, False)


def cycle(runs: list[str], seed: int) -> list[Op]:
    rng = np.random.default_rng(seed)
    datums = [random_datum(rng, "cross_entropy", 5) for _ in runs]
    passes = [Pass(r, 1, [d], "cross_entropy", {}, True) for r, d in zip(runs, datums, strict=True)]
    return [*passes, *(replace(STEP, run=run) for run in runs)]


def test_hundreds_of_idle_runs_use_the_device_memory_of_eight(new_engine: NewEngine) -> None:
    size = adapter_bytes(new_engine(), SPEC)
    engine, roomy = new_engine(adapter_bytes=8 * size), new_engine()
    seen = max_on_device(engine)
    for at in range(300):
        engine.adapters.restore(f"run-{at}", fresh_state(engine, at))
    assert engine.adapters.offloaded == 292

    for number in range(6):
        runs = [f"run-{at}" for at in range(number * 23, 300, 61)]
        for run in runs:
            if run not in roomy.adapters:
                roomy.adapters.restore(run, fresh_state(roomy, int(run.removeprefix("run-"))))
        for each in (engine, roomy):
            answers = each.run(cycle(runs, number)).outputs.values()
            assert not [answer for answer in answers if isinstance(answer, Failure)]

    assert engine.adapters.offloaded == 292
    assert 3 * size < seen() <= 8 * size
    trained = [f"run-{at}" for at in range(300) if f"run-{at}" in roomy.adapters]
    assert len(trained) > 20
    for run in trained:
        assert engine.adapters.state(run).digest() == roomy.adapters.state(run).digest()
    assert engine.adapters.state("run-1").digest() == fresh_state(engine, 1).digest()


@pytest.mark.parametrize("dtype", [torch.float32, variant(torch.bfloat16)])  # fp64 is not guaranteed
def test_a_cycle_too_large_for_the_device_runs_in_groups_with_equal_bits(
    new_engine: NewEngine, dtype: torch.dtype
) -> None:
    together = new_engine(dtype=dtype)
    tight = new_engine(dtype=dtype, adapter_bytes=1)  # one adapter per device group

    for number in range(3):
        ops = [op for tenant in MIX for op in tenant.ops(number)]
        ours, theirs = tight.run(ops), together.run(ops)
        assert list(ours.outputs) != []
        assert ours.tokens == theirs.tokens
        assert ours.forwards > theirs.forwards
        assert ours.outputs.keys() == theirs.outputs.keys()
        tight.adapters.prefetch([MIX[number].run])
    assert tight.adapters.offloaded == len(MIX) - 1

    for tenant in MIX:
        assert same_bits(tight.adapters.state(tenant.run), together.adapters.state(tenant.run))


def test_a_gradient_that_waits_for_its_step_is_offloaded_too(new_engine: NewEngine) -> None:
    roomy, tight = new_engine(), new_engine(adapter_bytes=1)
    for engine in (roomy, tight):
        engine.run([Create("a", 0, SPEC), *cycle(["a"], 0)[:1]])
        pending = engine.adapters.state("a")
        assert pending.grads_pending
        engine.run([Create("b", 0, SPEC), *cycle(["b"], 1)])
        assert engine.adapters.state("a").digest() == pending.digest()
        engine.run([replace(STEP, run="a", seq=2)])

    assert tight.adapters.state("a").digest() == roomy.adapters.state("a").digest()
    assert tight.adapters.state("a").step == 1


def test_an_offloaded_run_can_be_saved_and_loaded(new_engine: NewEngine) -> None:
    engine = new_engine(adapter_bytes=1)
    engine.run([Create("a", 0, SPEC), *cycle(["a"], 0)])
    engine.run([Create("b", 0, replace(SPEC, seed=1))])
    assert engine.adapters["a"].on_host

    saved = engine.run([Save("a", 20, optimizer=False)]).outputs["a", 20]
    assert isinstance(saved, SaveOutput)
    assert engine.adapters["b"].on_host
    engine.run([Load("b", 21, "tinker://x", saved.weights, None, creates=False)])

    assert torch.equal(engine.adapters.state("b").weights, engine.adapters.state("a").weights)


def test_a_dropped_run_frees_its_memory_in_any_tier(new_engine: NewEngine) -> None:
    engine = new_engine(adapter_bytes=1)
    engine.run([Create("a", 0, SPEC), Create("b", 0, SPEC)])
    assert engine.adapters.offloaded == 1

    for run in "abab":
        engine.adapters.drop(run)

    assert engine.adapters.offloaded == 0
    assert "a" not in engine.adapters


def test_the_least_recently_used_runs_exceed_the_host_budget(new_engine: NewEngine) -> None:
    size = adapter_bytes(new_engine(), SPEC)
    engine = new_engine(host_bytes=3 * size)  # on a CPU, the memory of the device is that of the host
    for run in "abcde":
        engine.adapters.restore(run, fresh_state(engine, 0))
    assert engine.adapters.runs_to_evict() == ["a", "b"]

    engine.run(cycle(["a"], 0))
    assert engine.adapters.runs_to_evict() == ["b", "c"]
    engine.adapters.drop("b")
    engine.adapters.drop("c")
    assert engine.adapters.runs_to_evict() == []
    assert new_engine().adapters.runs_to_evict() == []
