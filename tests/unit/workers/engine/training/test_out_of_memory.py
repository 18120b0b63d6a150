from __future__ import annotations

import pytest

from cotrain_workers.engine.training.micro_batches import MicroBatch, OpSlice
from cotrain_workers.engine.training.out_of_memory import Fail, Recompute, Split, after_oom

ONE_DATUM, TWO_DATUMS = (
    OpSlice(0, 4, 5, 300, needs_grad=True),
    OpSlice(0, 4, 6, 300, needs_grad=True),
)
FORWARD_ONLY = OpSlice(1, 0, 1, 200, needs_grad=False)
FIRST, SECOND = OpSlice(0, 4, 5, 100, needs_grad=True), OpSlice(0, 5, 6, 200, needs_grad=True)


def batch(*op_slices: OpSlice) -> MicroBatch:
    return MicroBatch(op_slices, align=8)


OF_OPS = Split(batch(ONE_DATUM), batch(FORWARD_ONLY), cuts_slice=False)
OF_DATUMS = Split(batch(FIRST), batch(SECOND), cuts_slice=True)
CASES = {
    "ops part before anything is recomputed": (batch(ONE_DATUM, FORWARD_ONLY), [300], True, OF_OPS),
    "ops part": (batch(ONE_DATUM, FORWARD_ONLY), [300], False, OF_OPS),
    "recomputed before it is cut": (batch(TWO_DATUMS), [100, 200], True, Recompute()),
    "cut at a datum": (batch(TWO_DATUMS), [100, 200], False, OF_DATUMS),
    "one datum is recomputed": (batch(ONE_DATUM), [300], True, Recompute()),
    "one datum fails": (batch(ONE_DATUM), [300], False, Fail(300)),
    "nothing to recompute in a forward": (batch(FORWARD_ONLY), [200], True, Fail(200)),
}


@pytest.mark.parametrize(
    ("given", "lengths", "can_recompute", "expected"), CASES.values(), ids=CASES
)
def test_what_does_not_fit_loses_least(
    given: MicroBatch,
    lengths: list[int],
    can_recompute: bool,
    expected: Recompute | Fail | Split,
) -> None:
    assert after_oom(given, lengths, can_recompute=can_recompute) == expected
