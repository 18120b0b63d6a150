from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from cotrain_store.bodies.reverse_kl_body import KlArrays, ReverseKlBody, encode_reverse_kl
from cotrain_store.messages.ids import RunId, WeightsRef
from cotrain_store.messages.ops import OpKind, QueuedOp
from cotrain_workers.engine.ops import Failure, HostOptimizer, HostWeights, ReverseKl, ReverseKlOutput, WeightsMissing
from cotrain_workers.engine.spec import AdapterSpec, Layout, plan_layout
from cotrain_workers.op_codec import reverse_kl_op
from cotrain_workers.results import result_of

REF = WeightsRef("other:train:0:3")
WEIGHTS = HostWeights(AdapterSpec(2, 0), torch.zeros(0))
OP = QueuedOp(RunId("run"), 5, OpKind.REVERSE_KL, 10, "inline", 100, 0.0)
DATUM = KlArrays(np.array([1, 2]), np.array([3]), np.array([7, 8]), np.array([1.0, 0.5], np.float32))


class Shelf:
    """Store with exactly the given checkpoints."""

    def __init__(self, weights: Mapping[WeightsRef, HostWeights]) -> None:
        self._weights = weights

    def host(self, ref: WeightsRef) -> HostWeights:
        if ref not in self._weights:
            raise WeightsMissing(ref)
        return self._weights[ref]

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        return None

    def layout_of(self, spec: AdapterSpec) -> Layout:
        return plan_layout(spec, ())


def read(reference: WeightsRef | None, shelf: Shelf) -> ReverseKl | Failure:
    body = encode_reverse_kl(ReverseKlBody(reference, 0.5, (DATUM,)))
    return reverse_kl_op(OP, body, shelf)


@pytest.mark.parametrize(("reference", "weights"), [(REF, WEIGHTS), (None, None)])
def test_a_request_is_read_with_its_reference(reference: WeightsRef | None, weights: HostWeights | None) -> None:
    op = read(reference, Shelf({REF: WEIGHTS}))

    assert isinstance(op, ReverseKl)
    assert (op.run, op.seq, op.temperature) == ("run", 5, 0.5)
    assert op.reference is weights
    (datum,) = op.datums
    assert datum.tokens.tolist() == [1, 2, 7]
    assert datum.reference.tolist() == [3, 7]
    assert datum.weights.tolist() == [1.0, 0.5]


def test_a_missing_reference_is_a_server_error() -> None:
    assert read(REF, Shelf({})) == Failure("The weights of the reference cannot be read on the server.", "server")


def test_an_unreadable_body_fails() -> None:
    failure = reverse_kl_op(OP, b"no", Shelf({}))
    assert isinstance(failure, Failure)
    assert failure.category == "user"


def test_the_means_are_over_the_targets_with_a_weight() -> None:
    losses = [np.array([1.0, 0.0], np.float32), np.array([2.0], np.float32)]

    result = result_of(OP, ReverseKlOutput(losses, 3.0, 1.5, 2), cycle=4)

    assert result.json()["metrics"] == {
        "loss:sum": 3.0,
        "loss:mean": 1.5,
        "reverse_kl:mean": 0.75,
        "num_samples:sum": 2.0,
        "num_tokens:sum": 2.0,
        "clock_cycle:unique": 4.0,
    }


def test_without_weighted_targets_the_means_are_zero() -> None:
    output = ReverseKlOutput([np.zeros(1, np.float32)], 0.0, 0.0, 0)
    metrics = result_of(OP, output, cycle=4).json()["metrics"]
    assert (metrics["loss:mean"], metrics["reverse_kl:mean"]) == (0.0, 0.0)
