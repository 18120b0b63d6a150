"""Turn a reverse-KL request into what the engine runs, and what it found into an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_store.bodies.reverse_kl_body import decode_reverse_kl, reverse_kl_answer
from cotrain_store.errors import MalformedBody
from cotrain_workers.engine.decoding.requests import WeightsGone
from cotrain_workers.engine.ops import Failure, KlDatum, ReverseKl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ops import QueuedOp
    from cotrain_workers.engine.ops import ReverseKlOutput
    from cotrain_workers.op_codec.loads import Checkpoints


def reverse_kl_op(op: QueuedOp, body: bytes, checkpoints: Checkpoints) -> ReverseKl | Failure:
    """Read a request and its reference; a Failure where one of them is not there."""
    try:
        request = decode_reverse_kl(body)
        reference = None if request.reference is None else checkpoints.host(request.reference)
    except MalformedBody as malformed:
        return Failure(str(malformed), "user")
    except WeightsGone:
        return Failure("The weights of the reference cannot be read on the server.", "server")
    datums = [
        KlDatum(datum.student_tokens, datum.reference_tokens, datum.weights)
        for datum in request.datums
    ]
    return ReverseKl(op.run, op.seq, datums, reference, request.temperature)


def answer_of(output: ReverseKlOutput, more_metrics: Mapping[str, float]) -> dict[str, Any]:
    """Say what was found, with the metrics that the hosted service gives, and more.

    Both means are over the targets whose weight is not 0.
    """
    tokens = max(output.weighted_tokens, 1)
    metrics = {
        "loss:sum": output.loss_sum,
        "loss:mean": output.loss_sum / tokens,
        "reverse_kl:mean": output.kl_sum / tokens,
        "num_samples:sum": float(len(output.losses)),
        "num_tokens:sum": float(output.weighted_tokens),
    }
    return reverse_kl_answer(output.losses, metrics | dict(more_metrics))
