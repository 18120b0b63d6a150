from __future__ import annotations

import pytest
import torch

from cotrain_workers.engine import running_cycle
from cotrain_workers.engine.coordination import drive
from cotrain_workers.engine.ops import Create, Failure, Load, Op, Save, SaveOutput
from tests.support.training import MIX, NewEngine


def test_a_save_has_the_weights_after_the_step_of_its_cycle(new_engine: NewEngine) -> None:
    engine, tenant = new_engine(), MIX[0]

    saved = engine.run([Save(tenant.run, 9), *tenant.ops(0)]).outputs[tenant.run, 9]

    assert isinstance(saved, SaveOutput)
    assert saved.weights.spec == tenant.spec
    assert saved.weights.flat.dtype == torch.float32
    assert torch.equal(saved.weights.flat, engine.adapters.state(tenant.run).weights)


def test_a_save_is_unchanged_while_its_run_trains(new_engine: NewEngine) -> None:
    engine, tenant = new_engine(), MIX[0]
    saved = engine.run([*tenant.ops(0), Save(tenant.run, 9)]).outputs[tenant.run, 9]
    assert isinstance(saved, SaveOutput)
    before = saved.weights.flat.clone()

    engine.run(tenant.ops(1))

    assert torch.equal(saved.weights.flat, before)
    assert not torch.equal(saved.weights.flat, engine.adapters.state(tenant.run).weights)


def test_two_saves_of_one_cycle_are_equal(new_engine: NewEngine) -> None:
    engine, tenant = new_engine(), MIX[0]

    outputs = engine.run([*tenant.ops(0), Save(tenant.run, 9), Save(tenant.run, 10)]).outputs

    first, second = outputs[tenant.run, 9], outputs[tenant.run, 10]
    assert isinstance(first, SaveOutput)
    assert isinstance(second, SaveOutput)
    assert torch.equal(first.weights.flat, second.weights.flat)


def test_an_unknown_run_cannot_be_saved(new_engine: NewEngine) -> None:
    output = new_engine().run([Save("unknown", 1)]).outputs["unknown", 1]

    assert isinstance(output, Failure)
    assert output.category == "user"
    assert "its creation failed" in output.message


def test_there_is_a_yield_point_after_every_micro_batch(new_engine: NewEngine) -> None:
    engine, yields = new_engine(micro_batch_tokens=64), []

    ops = [op for tenant in MIX for op in tenant.ops(0)]
    cycle, _ = drive(engine.cycle(ops), lambda: yields.append(1))

    assert len(yields) == cycle.forwards > 3


def test_there_is_a_yield_point_after_every_save_and_load(new_engine: NewEngine) -> None:
    engine, tenant, yields = new_engine(), MIX[0], []
    saved = engine.run([*tenant.ops(0), Save(tenant.run, 9)]).outputs[tenant.run, 9]
    assert isinstance(saved, SaveOutput)
    loads = [Load(tenant.run, seq, "kept", saved.weights, None) for seq in (12, 13)]
    ops: list[Op] = [Save(tenant.run, 10), Save(tenant.run, 11), *loads]

    cycle, _ = drive(engine.cycle(ops), lambda: yields.append(1))

    assert len(yields) == len(ops) == len(cycle.outputs)


def test_there_is_a_yield_point_between_two_adapters_of_many_values(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that begins together, or continues from checkpoints, does not hold sampling."""
    engine, made = new_engine(), []
    created = engine.run([Create("kept", 0, MIX[0].spec), Save("kept", 1)])
    saved = created.outputs["kept", 1]
    assert isinstance(saved, SaveOutput)
    begun: list[Op] = [Create(run, 0, MIX[0].spec) for run in "ab"]
    begun += [Load(run, 0, "kept", saved.weights, None, creates=True) for run in "cd"]
    monkeypatch.setattr(running_cycle, "DRAWN_AT_ONCE", 1)

    drive(engine.cycle(begun), lambda: made.append(engine.adapters.runs - {"kept"}))

    assert [len(runs) for runs in made] == [1, 2, 3, 4]


def test_without_passes_there_is_no_yield_point(new_engine: NewEngine) -> None:
    engine, yields = new_engine(), []

    drive(engine.cycle([Create("run", 0, MIX[0].spec)]), lambda: yields.append(1))

    assert yields == []
