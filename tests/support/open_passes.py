"""Passes of several slices, cycles that divide them, and comparisons of outputs bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from cotrain_workers.engine.coordination import run_to_end
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.ops import CycleOutput, Op, OptimStep, Output, Pass, PassOutput, ReverseKlOutput
from tests.support.training import random_datum

OpId = tuple[str, int]

#: Token limit of a micro-batch, and lengths of datums that are one slice each.
SLICE, LENGTHS = 16, (16, 11, 14, 16, 9)
#: One layer, for tests of the order in which slices are added. Every layer adds them, and the
#: backward of the first layer differs between its modules.
ONE_LAYER = MappingProxyType({"micro_batch_tokens": SLICE, "layers": 1})


def a_pass(
    seq: int, run: str = "a", *, needs_grad: bool = True, seed: int = 0, lengths: Sequence[int] = LENGTHS
) -> Pass:
    rng = np.random.default_rng([seed, seq])
    datums = [random_datum(rng, "cross_entropy", length) for length in lengths]
    return Pass(run, seq, datums, "cross_entropy", {}, needs_grad)


def a_step(seq: int, run: str = "a") -> OptimStep:
    return OptimStep(run, seq, 1e-2, 0.9, 0.95, 1e-8, 0.01, grad_clip_norm=1.0)


def one_cycle(engine: Engine, ops: Sequence[Op], **allowances: int) -> CycleOutput:
    """Run a cycle. `a1=20` allows 20 tokens of op 1 of run "a"."""
    return run_to_end(engine.cycle(ops, {(name[0], int(name[1:])): rows for name, rows in allowances.items()}))


def assert_same_output(ours: Output, theirs: Output) -> None:
    match theirs:
        case PassOutput():
            assert isinstance(ours, PassOutput), ours
            assert ours.loss_sum == theirs.loss_sum
            for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
                np.testing.assert_array_equal(mine, other, strict=True)
        case ReverseKlOutput():
            assert isinstance(ours, ReverseKlOutput), ours
            assert (ours.loss_sum, ours.kl_sum) == (theirs.loss_sum, theirs.kl_sum)
            for mine, other in zip(ours.losses, theirs.losses, strict=True):
                np.testing.assert_array_equal(mine, other, strict=True)
        case _:
            assert ours == theirs


def assert_same_outputs(ours: dict[OpId, Output], theirs: dict[OpId, Output]) -> None:
    assert ours.keys() == theirs.keys()
    for op_id, output in theirs.items():
        assert_same_output(ours[op_id], output)
