"""Scenarios that a group and a single engine must compute equally, and a program that runs them in a group.

`python -m tests.support.group_program FOLDER OUT SIZE RECOMPUTE SCENARIO…` writes to OUT the digests of runs by
scenario, and the parts of the base model in each member.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.model.activation_checkpointing import RecomputePolicy
from cotrain_workers.engine.ops import Create, KlDatum, Op, OptimStep, Pass, ReverseKl, Save, SaveOutput
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.group.engine import GroupEngine, WorkerEngine
from cotrain_workers.group.lock_step import GroupLockStep, follow
from cotrain_workers.group.processes import Links, launch
from cotrain_workers.group.sharded_base import load_sharded, own_bytes
from tests.support.training import MIX, Tenant, random_datum

MICRO_BATCH = 256


def main(folder: str, out: str, size: str, recompute: RecomputePolicy, *names: str) -> int:
    """Run one group to its end."""
    return launch(int(size), partial(member, folder, Path(out), recompute, names))


def member(folder: str, out: Path, recompute: RecomputePolicy, names: Sequence[str]) -> None:
    """Run one member."""
    torch.set_num_threads(1)
    links = Links("cpu", timeout_s=60)
    lock_step = GroupLockStep(links)
    own = Engine.load(
        folder,
        device="cpu",
        micro_batch_tokens=MICRO_BATCH,
        recompute=recompute,
        load_base=partial(load_sharded, lock_step=lock_step),
    )
    found: dict[str, Any] = {"base_bytes": own_bytes(own._base), "sharding": own.facts.numerics.sharding}
    if links.number:
        follow(own, lock_step)
    else:
        engine = GroupEngine(own, lock_step)
        found["numerics_id"] = engine.facts.numerics_id
        for name in names:
            found[name] = SCENARIOS[name](engine)
            found[f"{name} members"] = [each.runs for each in engine.processes]
            for run in found[name]:
                engine.adapters.drop(run)
        engine.followers.end()
    (out / f"{links.number}.json").write_text(json.dumps(found))
    links.close()


CYCLES = 2
HEAD_ONLY = next(tenant for tenant in MIX if tenant.run == "head-16")
DIVIDED = AdapterSpec(4, seed=11)


def together(engine: WorkerEngine) -> dict[str, str]:
    """Train every run together: mixed ranks, targets, losses."""
    return _train(engine, MIX)


def with_a_gradient_pending(engine: WorkerEngine) -> dict[str, str]:
    """Train two runs, the first with more work than the other, without a last step."""
    few, many = MIX[1], MIX[0]
    for cycle in range(CYCLES):
        ops = [*many.ops(cycle), *few.ops(cycle)]
        engine.run(ops if cycle < CYCLES - 1 else [op for op in ops if not isinstance(op, OptimStep)])
    return _digests(engine, [few.run, many.run])


def one_alone(engine: WorkerEngine) -> dict[str, str]:
    """Train one run. The other members have none."""
    return _train(engine, MIX[:1])


def head_alone(engine: WorkerEngine) -> dict[str, str]:
    """Train the unembedding of one run only, so that its passes have no backward through the base model."""
    return _train(engine, [HEAD_ONLY])


def head_and_more(engine: WorkerEngine) -> dict[str, str]:
    """Train the same next to a run that trains everything, with several micro-batches."""
    return _train(engine, [HEAD_ONLY, MIX[4]])


def reverse_kl(engine: WorkerEngine) -> dict[str, str]:
    """Train one run towards a checkpoint of another, which continues training."""
    teacher, student = MIX[0], "student"
    engine.run(teacher.ops(0))
    saved = engine.run([Save(teacher.run, 90)]).outputs[teacher.run, 90]
    assert isinstance(saved, SaveOutput)
    rng = np.random.default_rng(3)
    datums = []
    for context, target in ((5, 4), (30, 9)):
        tokens = rng.integers(0, 128, context + target - 1)
        weights = np.ones(target, np.float32)
        datums.append(KlDatum(tokens, tokens[2:], weights))
    ops: list[Op] = [
        Create(student, 0, AdapterSpec(4, seed=9)),
        ReverseKl(student, 1, datums, saved.weights, 1.0),
        OptimStep(student, 2, 1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0),
    ]
    engine.run([*teacher.ops(1), *ops])
    return _digests(engine, [teacher.run, student])


def over_cycles(engine: WorkerEngine) -> dict[str, str]:
    """Run a pass that stays open over some cycles, next to a run that trains in each."""
    rng = np.random.default_rng(5)
    datums = [random_datum(rng, "cross_entropy", 120) for _ in range(6)]
    other = MIX[1]
    engine.run([Create("divided", 0, DIVIDED), *other.ops(0)])
    op = Pass("divided", 1, datums, "cross_entropy", {}, needs_grad=True)
    for cycle in range(1, 9):
        allowances = {("divided", 1): 240}
        out = _run(engine, [op, *other.ops(cycle)], allowances)
        if ("divided", 1) in out:
            break
        assert ("divided", 1) in engine.open_passes
        assert "divided" in engine.open_passes.runs
    else:
        raise AssertionError("The pass has not come to its end.")
    engine.run([OptimStep("divided", 2, 1e-2, 0.9, 0.95, 1e-8, 0.0, 0.0)])
    return _digests(engine, ["divided", other.run])


def put_back(engine: WorkerEngine) -> dict[str, str]:
    """Copy runs out, drop, restore and train them."""
    _train(engine, MIX[:3])
    states = {tenant.run: engine.adapters.copy_out(tenant.run).state() for tenant in MIX[:3]}
    for run in states:
        engine.adapters.drop(run)
        assert run not in engine.adapters
    for run, state in reversed(states.items()):
        engine.adapters.restore(run, state)
    engine.run([op for tenant in MIX[:3] for op in tenant.ops(CYCLES)])
    return _digests(engine, states)


SCENARIOS: dict[str, Callable[[WorkerEngine], dict[str, str]]] = {
    each.__name__: each
    for each in (
        together, with_a_gradient_pending, one_alone, head_alone, head_and_more, reverse_kl,
        over_cycles, put_back,
    )
}  # fmt: skip


def _train(engine: WorkerEngine, tenants: Sequence[Tenant]) -> dict[str, str]:
    for cycle in range(CYCLES):
        engine.run([op for tenant in tenants for op in tenant.ops(cycle)])
    return _digests(engine, [tenant.run for tenant in tenants])


def _run(
    engine: WorkerEngine, ops: Sequence[Op], allowances: Mapping[tuple[str, int], int]
) -> Mapping[tuple[str, int], object]:
    work = engine.cycle(ops, allowances)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value.outputs  # type: ignore[no-any-return]


def _digests(engine: WorkerEngine, runs: Sequence[str] | Mapping[str, object]) -> dict[str, str]:
    return {run: engine.adapters.state(run).digest() for run in runs}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
