"""Guarantee of the project: a run among others equals the run alone, with identical bits on CPU in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, CycleOutput, Failure, Op, Pass, PassOutput
from tests.support.draws import variant
from tests.support.tiny_models import build_tiny
from tests.support.training import MIX, NewEngine, Tenant, same_bits

pytestmark = pytest.mark.numerics

CYCLES = 3


def interleaved(tenants: Sequence[Tenant], cycle: int, rng: np.random.Generator) -> list[Op]:
    """Mix the ops of several runs. The ops of each run stay in order."""
    queues = [tenant.ops(cycle) for tenant in tenants]
    ops = []
    while queues:
        queue = queues[rng.integers(len(queues))]
        ops.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return ops


def assert_same_answers(run: str, mixed: CycleOutput, alone: CycleOutput) -> None:
    for key, expected in alone.outputs.items():
        answer = mixed.outputs[key]
        if isinstance(expected, PassOutput):
            assert isinstance(answer, PassOutput), answer
            assert answer.loss_sum == expected.loss_sum
            for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
                assert ours.dtype == np.float32
                np.testing.assert_array_equal(ours, theirs, strict=True)
        else:
            assert answer == expected


@pytest.mark.parametrize("family", [variant("qwen3"), "gemma3"])
@pytest.mark.parametrize("micro_batch_tokens", [variant(8192), 64])
def test_a_run_among_others_equals_the_run_alone_exactly(
    new_engine: NewEngine, family: str, micro_batch_tokens: int
) -> None:
    rng = np.random.default_rng(7)
    together = new_engine(family, micro_batch_tokens=micro_batch_tokens)
    alone = new_engine(family, micro_batch_tokens=micro_batch_tokens)

    for cycle in range(CYCLES):
        present = [tenant for tenant in MIX if cycle == 0 or rng.random() < 0.8]
        mixed = together.run(interleaved(present, cycle, rng))
        for tenant in present:
            assert_same_answers(tenant.run, mixed, alone.run(tenant.ops(cycle)))

    for tenant in MIX:
        assert together.adapters.state(tenant.run).step > 0
        assert same_bits(together.adapters.state(tenant.run), alone.adapters.state(tenant.run)), tenant.run


def test_widths_that_split_cache_lines_change_no_bit(tmp_path: Path) -> None:
    """Segments then start anywhere in memory, and a GEMM may depend on the alignment of its operands."""
    folder = build_tiny("qwen3", tmp_path, hidden=72, vocab=131)
    together, alone = Engine.load(str(folder)), Engine.load(str(folder))

    together.run(interleaved(MIX, 0, np.random.default_rng(5)))

    for tenant in MIX:
        alone.run(tenant.ops(0))
        assert same_bits(together.adapters.state(tenant.run), alone.adapters.state(tenant.run)), tenant.run


def test_two_threads_change_no_bit(new_engine: NewEngine) -> None:
    torch.set_num_threads(2)
    try:
        rng = np.random.default_rng(3)
        together, alone = new_engine(), new_engine()
        for cycle in range(2):
            mixed = together.run(interleaved(MIX, cycle, rng))
            for tenant in MIX:
                assert_same_answers(tenant.run, mixed, alone.run(tenant.ops(cycle)))
        for tenant in MIX:
            assert same_bits(together.adapters.state(tenant.run), alone.adapters.state(tenant.run)), tenant.run
    finally:
        torch.set_num_threads(1)


def test_the_division_of_ops_into_cycles_changes_no_bit(new_engine: NewEngine) -> None:
    one_cycle, op_by_op = new_engine(), new_engine()

    for cycle in range(2):
        ops = MIX[0].ops(cycle)
        one_cycle.run(ops)
        for op in ops:
            op_by_op.run([op])

    assert same_bits(one_cycle.adapters.state("all-8"), op_by_op.adapters.state("all-8"))


def test_the_same_ops_twice_give_the_same_bits(new_engine: NewEngine) -> None:
    first, second = new_engine(), new_engine()

    for cycle in range(2):
        for engine in (first, second):
            engine.run(interleaved(MIX, cycle, np.random.default_rng(cycle)))

    for tenant in MIX:
        assert same_bits(first.adapters.state(tenant.run), second.adapters.state(tenant.run))


def poisoned(op: Op) -> Op:
    """Return a pass with NaN weights."""
    assert isinstance(op, Pass)
    datums = [replace(d, inputs={**d.inputs, "weights": np.full(len(d.tokens), np.nan, np.float32)}) for d in op.datums]
    return replace(op, datums=datums)


def test_a_neighbour_with_nan_inputs_changes_no_bit(new_engine: NewEngine) -> None:
    victim, neighbour = MIX[4], MIX[0]
    among, alone = new_engine(), new_engine()
    bad = [poisoned(op) if isinstance(op, Pass) else op for op in neighbour.ops(0)]

    mixed = among.run([*bad, *victim.ops(0)])
    assert_same_answers(victim.run, mixed, alone.run(victim.ops(0)))

    assert same_bits(among.adapters.state(victim.run), alone.adapters.state(victim.run))
    assert mixed.outputs[neighbour.run, 1] == Failure(
        "Loss is not finite (seq 1); the gradient was discarded.", "user", "not_finite"
    )
    assert mixed.outputs[neighbour.run, 2] == Failure("Loss is not finite (seq 2).", "user", "not_finite")


def test_a_neighbour_with_nan_weights_changes_no_bit(new_engine: NewEngine) -> None:
    victim, neighbour = MIX[4], MIX[0]
    among, alone = new_engine(), new_engine()
    among.run([Create(neighbour.run, 0, neighbour.spec)])
    ruined = among.adapters.state(neighbour.run)
    among.adapters.restore(neighbour.run, replace(ruined, weights=torch.full_like(ruined.weights, np.nan)))

    mixed = among.run([*neighbour.ops(0)[1:], *victim.ops(0)])
    assert_same_answers(victim.run, mixed, alone.run(victim.ops(0)))

    assert same_bits(among.adapters.state(victim.run), alone.adapters.state(victim.run))
    assert isinstance(mixed.outputs[neighbour.run, 1], Failure)


def test_a_failed_op_keeps_the_gradient_of_earlier_ops(new_engine: NewEngine) -> None:
    tenant = MIX[0]
    _, good, _, also_good, step = tenant.ops(0)
    engine, expected = new_engine(), new_engine()

    for first_cycle in ([good, poisoned(good)], [poisoned(good), good]):
        engine.adapters.drop(tenant.run)
        expected.adapters.drop(tenant.run)
        create = Create(tenant.run, 0, tenant.spec)
        outputs = [
            engine.run([create, replace(first_cycle[0], seq=1), replace(first_cycle[1], seq=2)]),
            engine.run([replace(poisoned(good), seq=3), replace(also_good, seq=4)]),
        ]
        expected.run([create, good, also_good])
        failed = [k for out in outputs for k, o in out.outputs.items() if isinstance(o, Failure)]
        assert len(failed) == 2

        assert same_bits(engine.adapters.state(tenant.run), expected.adapters.state(tenant.run))
        engine.run([step])
        expected.run([step])
        assert same_bits(engine.adapters.state(tenant.run), expected.adapters.state(tenant.run))
