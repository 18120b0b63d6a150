"""Saving and loading of an adapter: a run continues from a checkpoint with identical bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain_workers.engine import running_cycle
from cotrain_workers.engine.adapters.lifecycle import mix, mixed_spec
from cotrain_workers.engine.coordination import drive
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import (
    Create,
    Failure,
    HostWeights,
    Import,
    Load,
    LoadOutput,
    Op,
    OptimStep,
    Pass,
    PassOutput,
    PeftAdapter,
    Save,
    SaveOutput,
)
from cotrain_workers.engine.spec import AdapterSpec, Layout, Target, plan_layout
from tests.support.draws import variant
from tests.support.training import MIX, NewEngine, PeftOracle, Tenant, same_bits

TENANT = MIX[0]


def saved(engine: Engine, run: str = TENANT.run) -> SaveOutput:
    output = engine.run([Save(run, 99, optimizer=True)]).outputs[run, 99]
    assert isinstance(output, SaveOutput)
    return output


def load_of(save: SaveOutput, *, run: str = TENANT.run, seq: int = 98, optimizer: bool, creates: bool = False) -> Load:
    state = save.optimizer if optimizer else None
    return Load(run, seq, "tinker://r/weights/x", save.weights, state, creates)


def logprobs_of(engine: Engine, tenant: Tenant = TENANT) -> list[bytes]:
    """Return the logprobs of the datums of cycle 1, which are the same for every name of the run."""
    forward = next(op for op in TENANT.ops(1) if isinstance(op, Pass) and not op.needs_grad)
    output = engine.run([replace(forward, run=tenant.run)]).outputs[tenant.run, forward.seq]
    assert isinstance(output, PassOutput)
    return [logprobs.tobytes() for logprobs in output.logprobs]


def for_run(ops: list[Op], run: str) -> list[Op]:
    return [replace(op, run=run) for op in ops]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_load_restores_weights_optimizer_and_later_steps_exactly(new_engine: NewEngine, dtype: torch.dtype) -> None:
    engine, stayed = new_engine(dtype=dtype), new_engine(dtype=dtype)
    for each in (engine, stayed):
        each.run(TENANT.ops(0))
    before, logprobs = engine.adapters.state(TENANT.run), logprobs_of(engine)
    save = saved(engine)
    for cycle in (1, 2):
        engine.run(TENANT.ops(cycle))
    assert logprobs_of(engine) != logprobs

    loaded = engine.run([load_of(save, optimizer=True)]).outputs[TENANT.run, 98]

    assert loaded == LoadOutput("tinker://r/weights/x")
    assert same_bits(engine.adapters.state(TENANT.run), before)
    assert logprobs_of(engine) == logprobs
    for each in (engine, stayed):
        each.run(TENANT.ops(1))
    assert same_bits(engine.adapters.state(TENANT.run), stayed.adapters.state(TENANT.run))


def test_a_load_without_optimizer_state_resets_adam(new_engine: NewEngine) -> None:
    engine, fresh = new_engine(), new_engine()
    engine.run(TENANT.ops(0))
    save = saved(engine)
    engine.run([load_of(save, optimizer=False)])
    state = engine.adapters.state(TENANT.run)
    assert torch.equal(state.weights, save.weights.flat)
    assert (state.step, int(state.m.count_nonzero()), int(state.v.count_nonzero())) == (0, 0, 0)

    fresh.run([load_of(save, seq=0, optimizer=False, creates=True)])
    assert logprobs_of(fresh) == logprobs_of(engine)
    for each in (engine, fresh):
        each.run(TENANT.ops(1))
    assert same_bits(engine.adapters.state(TENANT.run), fresh.adapters.state(TENANT.run))


def test_a_load_drops_a_pending_gradient(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run(TENANT.ops(0))
    before, save = engine.adapters.state(TENANT.run), saved(engine)
    engine.run([op for op in TENANT.ops(1) if isinstance(op, Pass)])
    assert engine.adapters.state(TENANT.run).grads_pending

    engine.run([load_of(save, optimizer=True)])

    assert same_bits(engine.adapters.state(TENANT.run), before)


def test_a_checkpoint_is_unchanged_while_a_run_that_loaded_it_trains(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run(TENANT.ops(0))
    save = saved(engine)
    assert save.optimizer
    arenas = (save.weights.flat, save.optimizer.m, save.optimizer.v)
    before = [arena.clone() for arena in arenas]
    engine.run([load_of(save, optimizer=True)])
    engine.run(TENANT.ops(1))
    assert all(map(torch.equal, arenas, before))


def test_a_new_run_continues_from_a_checkpoint(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run(TENANT.ops(0))
    first = [load_of(saved(engine), run="new", seq=0, optimizer=True, creates=True)]

    engine.run([*TENANT.ops(1), *first, *for_run(TENANT.ops(1), "new")])

    assert same_bits(engine.adapters.state("new"), engine.adapters.state(TENANT.run))


def test_another_run_loads_a_checkpoint_and_keeps_its_own_seed(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run([*TENANT.ops(0), Create("other", 0, replace(TENANT.spec, seed=77))])
    engine.run([load_of(saved(engine), run="other", optimizer=True)])
    other, mine = engine.adapters.state("other"), engine.adapters.state(TENANT.run)
    assert other.spec.seed == 77
    assert same_bits(replace(other, spec=mine.spec), mine)


def test_saves_and_loads_of_one_cycle_run_in_their_order(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.run(TENANT.ops(0))
    first = saved(engine)
    outputs = engine.run(
        [
            *TENANT.ops(1),
            Save(TENANT.run, 20),
            load_of(first, seq=21, optimizer=True),
            Save(TENANT.run, 22, optimizer=True),
        ]
    ).outputs
    trained, again = outputs[TENANT.run, 20], outputs[TENANT.run, 22]
    assert isinstance(trained, SaveOutput)
    assert isinstance(again, SaveOutput)
    assert first.optimizer
    assert again.optimizer
    assert trained.optimizer is None  # saved for sampling
    assert not torch.equal(trained.weights.flat, first.weights.flat)
    assert torch.equal(again.weights.flat, first.weights.flat)
    assert torch.equal(again.optimizer.v, first.optimizer.v)
    assert again.optimizer.step == first.optimizer.step == 1


def test_runs_that_load_among_others_change_no_bit_of_any_run(new_engine: NewEngine) -> None:
    """Two runs of the mix load, one starts with a load, and the others train. Each result equals that of the run alone."""

    def ops_of(tenant: Tenant, save: SaveOutput, cycle: int) -> list[Op]:
        ops = tenant.ops(cycle)
        if tenant in MIX[:2] and cycle == 1:
            ops.append(load_of(save, run=tenant.run, seq=50, optimizer=tenant is MIX[0]))
        return ops

    together, checkpoint_by_run = new_engine(), {}
    together.run([op for tenant in MIX for op in tenant.ops(0)])
    for tenant in MIX:
        checkpoint_by_run[tenant.run] = saved(together, tenant.run)
    born = load_of(checkpoint_by_run[MIX[2].run], run="born", seq=0, optimizer=True, creates=True)
    for cycle in (1, 2):
        beginning: list[Op] = [born] if cycle == 1 else []
        together.run(
            [
                *beginning,
                *for_run(MIX[2].ops(cycle), "born"),
                *(op for t in MIX for op in ops_of(t, checkpoint_by_run[t.run], cycle)),
            ]
        )
    for tenant in MIX:
        alone = new_engine()
        for cycle in (0, 1, 2):
            alone.run(ops_of(tenant, checkpoint_by_run[tenant.run], cycle))
        assert same_bits(together.adapters.state(tenant.run), alone.adapters.state(tenant.run)), tenant.run
    assert same_bits(together.adapters.state("born"), together.adapters.state(MIX[2].run))


@pytest.mark.parametrize(
    "spec", [AdapterSpec(4, 1), AdapterSpec(8, 1, train_unembed=False), AdapterSpec(8, 1, train_mlp=False)], ids=str
)
def test_a_checkpoint_of_another_shape_is_refused_without_a_change(new_engine: NewEngine, spec: AdapterSpec) -> None:
    engine = new_engine()
    engine.run([*TENANT.ops(0), Create("other", 0, spec)])
    before = engine.adapters.state(TENANT.run)
    refused = engine.run([load_of(saved(engine, "other"), optimizer=True)]).outputs[TENANT.run, 98]
    assert isinstance(refused, Failure)
    assert refused.category == "user"
    for words in (
        f"rank {spec.rank}, train_attn=True, train_mlp={spec.train_mlp}, train_unembed={spec.train_unembed}; this run",
        "rank 8, train_attn=True, train_mlp=True, train_unembed=True",
    ):
        assert words in refused.message
    assert same_bits(engine.adapters.state(TENANT.run), before)


def test_every_op_after_a_failed_creation_reports_it(new_engine: NewEngine) -> None:
    engine = new_engine()
    wide = AdapterSpec(rank=10_000, seed=0)
    flat = torch.zeros(engine.adapters.layout_of(wide).size)
    refused: list[Op] = [
        Load("a", 0, "tinker://r/weights/x", HostWeights(wide, flat), None, creates=True),
        Create("b", 0, wide),
        Import("c", 0, PeftAdapter(TENANT.spec, (), b"no adapter")),
    ]
    for first in refused:
        later: list[Op] = [
            *for_run([op for op in TENANT.ops(0) if isinstance(op, Pass | OptimStep)], first.run),
            Save(first.run, 20, optimizer=True),
            Load(first.run, 21, "tinker://r/weights/x", HostWeights(wide, flat), None),
        ]
        outputs = engine.run([first, *later]).outputs
        for op in (first, *later):
            failure = outputs[op.run, op.seq]
            assert isinstance(failure, Failure), op
            assert failure.category == "user"
            assert (op is first) != ("its creation failed" in failure.message)
    assert not any(first.run in engine.adapters for first in refused)


def without_optimizer(save: SaveOutput, alpha: float) -> SaveOutput:
    return SaveOutput(HostWeights(replace(save.weights.spec, alpha=alpha), save.weights.flat))


def test_loaded_weights_of_another_alpha_keep_their_effect(new_engine: NewEngine) -> None:
    """The B matrix of the run is scaled by the ratio. Equal up to fp32 rounding, since 7.5 / 32 is not a power of two."""
    engine, other = new_engine(), new_engine()
    engine.run(TENANT.ops(0))
    theirs = replace(TENANT.spec, alpha=7.5)
    other.run([Create(TENANT.run, 0, theirs)])
    other.run([load_of(without_optimizer(saved(engine), 7.5), optimizer=False)])
    engine.run([load_of(without_optimizer(saved(engine), 7.5), optimizer=False)])

    for each, factor in ((other, 1.0), (engine, 7.5 / 32)):
        expected = saved(other).weights.flat.clone()
        for pair in each.adapters[TENANT.run].layout.views(expected).values():
            pair.b.mul_(factor)
        torch.testing.assert_close(each.adapters.state(TENANT.run).weights, expected, rtol=1e-6, atol=0)
    ours, scaled = (np.frombuffer(b"".join(logprobs_of(e)), np.float32) for e in (other, engine))
    np.testing.assert_allclose(ours, scaled, atol=1e-5)


@pytest.mark.parametrize(
    ("alpha", "optimizer", "said"), [(7.5, True, "another alpha"), (1e300, False, "too large an alpha")]
)
def test_an_alpha_that_does_not_fit_is_refused(new_engine: NewEngine, alpha: float, optimizer: bool, said: str) -> None:
    engine = new_engine()
    engine.run(TENANT.ops(0))
    before, save = engine.adapters.state(TENANT.run), saved(engine)

    weights = without_optimizer(save, alpha).weights
    load = replace(load_of(save, optimizer=optimizer), weights=weights)
    failure = engine.run([load]).outputs[TENANT.run, 98]

    assert isinstance(failure, Failure)
    assert said in failure.message
    assert same_bits(engine.adapters.state(TENANT.run), before)


@pytest.mark.parametrize(
    ("ruined", "creates"), [("weights", True), ("m", False), ("v", True), variant("weights", False)]
)
def test_a_checkpoint_with_non_finite_values_is_refused(new_engine: NewEngine, ruined: str, creates: bool) -> None:
    engine = new_engine()
    engine.run(TENANT.ops(0))
    save = saved(engine)
    assert save.optimizer
    weights = HostWeights(save.weights.spec, save.weights.flat.clone())
    optimizer = replace(save.optimizer, m=save.optimizer.m.clone(), v=save.optimizer.v.clone())
    arena = weights.flat if ruined == "weights" else getattr(optimizer, ruined)
    arena[5] = float("inf")
    load = replace(load_of(save, optimizer=True, creates=creates), weights=weights, optimizer=optimizer)
    load = replace(load, run="new" if creates else TENANT.run)
    before = engine.adapters.state(TENANT.run)

    failure = engine.run([load]).outputs[load.run, 98]

    assert isinstance(failure, Failure)
    what = "weights that are" if ruined == "weights" else "an optimizer state that is"
    assert failure.message.startswith(f"Checkpoint tinker://r/weights/x holds {what} not finite")
    assert same_bits(engine.adapters.state(TENANT.run), before)
    assert ("new" in engine.adapters) is False
    if ruined != "weights":
        loaded = engine.run([replace(load, optimizer=None)]).outputs[load.run, 98]
        assert loaded == LoadOutput("tinker://r/weights/x")


TARGETS = (Target("q", "attn", 6, 10), Target("up", "mlp", 6, 9), Target("head", "unembed", 6, 20))


def layout_of(spec: AdapterSpec) -> Layout:
    return plan_layout(spec, TARGETS)


def adapter(spec: AdapterSpec, layout_of: Callable[[AdapterSpec], Layout] = layout_of) -> HostWeights:
    layout = layout_of(spec)
    weights = HostWeights(spec, torch.zeros(layout.size))
    generator = torch.Generator().manual_seed(spec.seed)
    for pair in layout.views(weights.flat).values():
        for matrix in pair:
            matrix.copy_(torch.randn(matrix.shape, generator=generator) / matrix.shape[0] ** 0.5)
    return weights


def change(weights: HostWeights, name: str, target: Target) -> torch.Tensor:
    """Return the fp64 product that the adapter adds to the weight of a module."""
    pair = layout_of(weights.spec).views(weights.flat).get(name)
    if pair is None:
        return torch.zeros(target.outputs, target.inputs, dtype=torch.float64)
    return weights.spec.scale * (pair.b.double() @ pair.a.double())


def test_the_effect_of_a_mix_is_the_sum_of_the_effects() -> None:
    sources = [
        (0.75, adapter(AdapterSpec(4, 1))),
        (-2.0, adapter(AdapterSpec(3, 2, train_mlp=False))),
        (0.5, adapter(AdapterSpec(1, 3, train_attn=False, train_unembed=False, alpha=7.5))),
    ]

    mixed = mix(sources, layout_of)

    assert mixed.spec.rank == 8
    for target in TARGETS:
        expected = torch.stack([c * change(w, target.name, target) for c, w in sources]).sum(0)
        ours = change(mixed, target.name, target)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)  # fp32 weights


def test_a_single_source_with_coefficient_one_is_unchanged() -> None:
    source = adapter(AdapterSpec(5, 7, train_mlp=False, alpha=12.0))

    mixed = mix([(1.0, source)], layout_of)

    assert mixed.spec == source.spec
    assert torch.equal(mixed.flat, source.flat)


def test_a_mix_trains_every_module_of_a_source_and_has_one_scale() -> None:
    spec = mixed_spec(
        [
            AdapterSpec(4, 9, train_attn=False, train_mlp=False),
            AdapterSpec(2, 1, train_mlp=False, train_unembed=False, alpha=8.0),
        ]
    )

    assert spec == AdapterSpec(6, 9, train_mlp=False, alpha=32.0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_of_a_mix_equal_those_of_peft_with_summed_weights(
    new_engine: NewEngine, model_folder: Callable[..., Path], *, tied: bool
) -> None:
    """PEFT loads each source as an adapter. Its linear layers are then merged by hand."""
    engine, folder = new_engine(tied=tied), model_folder(tied=tied)
    sources = [
        (0.6, adapter(AdapterSpec(4, 1), engine.adapters.layout_of)),
        (0.7, adapter(AdapterSpec(2, 2, train_mlp=False), engine.adapters.layout_of)),
    ]
    mixed = mix(sources, engine.adapters.layout_of)
    tokens = np.random.default_rng(0).integers(0, 128, 20)

    ours = logits(folder, [(1.0, mixed)], engine, tokens)
    expected = logits(folder, sources, engine, tokens)

    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def logits(folder: Path, sources: list[tuple[float, HostWeights]], engine: Engine, tokens: np.ndarray) -> torch.Tensor:
    """Return the logits of plain PEFT with `sum c_i * change_i` in fp64 in place of one adapter."""
    widest = mixed_spec([weights.spec for _, weights in sources])
    oracle = PeftOracle(folder, widest, torch.float64)
    deltas: dict[str, torch.Tensor] = {}
    for coefficient, weights in sources:
        for name, pair in engine.adapters.layout_of(weights.spec).views(weights.flat).items():
            delta = coefficient * weights.spec.scale * (pair.b.double() @ pair.a.double())
            deltas[name] = deltas.get(name, torch.zeros_like(delta)) + delta
    modules: dict[str, Any] = dict(oracle.model.named_modules())
    hooks = []
    for name, delta in deltas.items():
        module = modules[f"base_model.model.{name}"]
        hooks.append(module.register_forward_hook(lambda _, args, out, delta=delta: out + args[0] @ delta.t()))
    with torch.no_grad():
        found: torch.Tensor = oracle.model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
    return found


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
