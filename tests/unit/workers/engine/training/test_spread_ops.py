"""Ops of a run spread over cycles in any way: every bit equals that of ops run one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import Create, Failure, Op, OptimStep, Output, Pass
from cotrain_workers.engine.spec import AdapterSpec
from tests.support.draws import variant
from tests.support.open_passes import (
    LENGTHS,
    ONE_LAYER,
    a_pass,
    a_step,
    assert_same_output,
    assert_same_outputs,
    one_cycle,
)
from tests.support.training import NewEngine, same_bits

OpId = tuple[str, int]

#: Ways to spread ops, of which one is repeated with AVX2 only: only the kernels differ there, not the ways.
SEEDS = 6
#: A first slice, one in the middle and a last one. Three slices cover all transitions between slices.
THREE = LENGTHS[:3]


def two_begun(new_engine: NewEngine) -> tuple[Engine, Engine]:
    """Return two engines with a new run "a"."""
    divided, whole = (new_engine(**ONE_LAYER) for _ in range(2))
    for engine in (divided, whole):
        engine.run([Create("a", 0, AdapterSpec(8, seed=1))])
    return divided, whole


@pytest.mark.numerics
def test_an_open_pass_that_ends_together_with_the_next_has_the_same_sum(new_engine: NewEngine) -> None:
    divided, whole = two_begun(new_engine)
    ops: list[Op] = [a_pass(1), a_pass(2), a_step(3)]
    one_cycle(divided, ops, a1=sum(LENGTHS[:4]))
    assert_same_outputs(dict(divided.run(ops).outputs), dict(whole.run(ops).outputs))
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


@pytest.mark.numerics
def test_a_failed_pass_after_an_open_one_leaves_its_gradient(new_engine: NewEngine) -> None:
    divided, whole = two_begun(new_engine)
    infinite = a_pass(2)
    for datum in infinite.datums:
        datum.inputs["weights"][:] = np.inf
    one_cycle(divided, [a_pass(1), infinite], a1=sum(LENGTHS[:4]))
    out = divided.run([a_pass(1), infinite])
    assert isinstance(out.outputs["a", 2], Failure)
    whole.run([a_pass(1)])
    assert same_bits(divided.adapters.state("a"), whole.adapters.state("a"))


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.numerics), *map(variant, range(1, SEEDS)), SEEDS])
def test_ops_spread_over_cycles_have_the_bits_of_ops_one_by_one(new_engine: NewEngine, seed: int) -> None:
    """Any ops of a run that may share a cycle, with any passes divided at any border, with or without a deadline."""
    draw = random.Random(seed)
    spread, one_by_one = (new_engine(**ONE_LAYER) for _ in range(2))
    left: dict[str, list[Op]] = {run: ops_of_a_run(draw, run) for run in ("a", "b")}
    expected: dict[OpId, Output] = {}
    for op in [op for ops in left.values() for op in ops]:
        expected.update(one_by_one.run([op]).outputs)
    while any(left.values()):
        ops = [op for run in left for op in of_one_cycle(left[run][: draw.randrange(6)])]
        allowances = {op.id: draw.randint(1, sum(THREE)) for op in ops if isinstance(op, Pass) and draw.random() < 0.5}
        is_over = iter([False] * draw.choice((0, 1, 2, 99)))
        out = run_to_end(spread.cycle(ops, allowances, partial(next, is_over, True)))
        for op_id, output in out.outputs.items():
            assert_same_output(output, expected[op_id])
        left = {run: [op for op in ops if op.id not in out.outputs] for run, ops in left.items()}
    for run in left:
        assert same_bits(spread.adapters.state(run), one_by_one.adapters.state(run))


def ops_of_a_run(draw: random.Random, run: str) -> list[Op]:
    ops: list[Op] = [Create(run, 0, AdapterSpec(draw.choice((2, 8)), seed=draw.randrange(99)))]
    for _ in range(10):
        is_step = draw.random() < 0.3
        needs_grad = draw.random() < 0.8
        ops.append(a_step(len(ops), run) if is_step else a_pass(len(ops), run, needs_grad=needs_grad, lengths=THREE))
    return ops


def of_one_cycle(ops: Sequence[Op]) -> list[Op]:
    """Return the first ops of a run that may share a cycle, without those after a step."""
    steps = [at for at, op in enumerate(ops) if isinstance(op, OptimStep)]
    return [*ops[: steps[0] + 1]] if steps else [*ops]
