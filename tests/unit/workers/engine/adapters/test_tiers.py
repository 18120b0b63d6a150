"""Offloading of idle adapters to host memory, without a change of bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine.adapters.copies import AdapterState
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Failure, Load, Op, OptimStep, Pass, Save, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.draws import variant
from tests.support.training import MIX, NewEngine, random_datum, same_bits

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


def test_a_step_with_a_non_finite_gradient_fails_alone(new_engine: NewEngine) -> None:
    mixed, alone = new_engine(), new_engine()
    for engine, runs in ((mixed, ["a", "bad", "c"]), (alone, ["a"]), (alone, ["c"])):
        for run in runs:
            engine.run([Create(run, 0, replace(SPEC, seed=len(run))), *cycle([run], 0)[:1]])
    before = mixed.adapters.state("bad").weights
    mixed.adapters["bad"].gradient.flat[3] = torch.inf

    outputs = mixed.run([replace(STEP, run=run) for run in ("a", "bad", "c")]).outputs
    for run in ("a", "c"):
        alone.run([replace(STEP, run=run)])

    failure, left = outputs["bad", 9], mixed.adapters.state("bad")
    assert isinstance(failure, Failure)
    assert "not finite" in failure.message
    assert torch.equal(left.weights, before)
    assert (bool(left.grads.any()), left.step, left.grads_pending) == (False, 0, False)
    for run in ("a", "c"):
        assert mixed.adapters.state(run).digest() == alone.adapters.state(run).digest()
        assert mixed.adapters.state(run).step == 1
