"""Conversion of one batch for several runs to ops of their logs.

Each run gets the op of the batch at its own position, and with Adam's parameters an optimizer step
at the next one. Its log then equals that of a run that got both alone. The batch is checked once and
stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import AdamParams, SweepFuture
from cotrain_server.errors import Unreadable, status_of
from cotrain_server.requests.pass_ops import Op, ParsedPass, digest_of
from cotrain_server.requests.pass_scan import split_sweep
from cotrain_server.requests.pass_validation import check_adam
from cotrain_server.requests.passes import (
    RunRequest,
    op_or_refusal,
    parse_run_and_seq,
    read_sweep_pass,
)
from cotrain_store.errors import MalformedBody, RunNotFound
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.joint_intake import JointOp


@dataclass(frozen=True)
class SweepEntry:
    """Position of the batch in the order of one run, and the optimizer step after it, if any."""

    model_id: str
    seq: int
    step: Op | None


@dataclass(frozen=True)
class ParsedSweep:
    """Request for several runs, each with a known position."""

    entries: tuple[SweepEntry, ...]
    batch: ParsedPass


def read_sweep(body: bytes) -> ParsedSweep:
    """Parse a SweepPassRequest.

    Raises:
        Invalid: too many runs.
        Unreadable: not the message, without runs, or with a run without a position.
    """
    try:
        head, batch = split_sweep(body)
        runs = wire.SweepPassRequest.FromString(head).runs
    except (MalformedBody, DecodeError) as error:
        raise Unreadable(str(error)) from error
    entries = tuple(_entry(number, run) for number, run in enumerate(runs))
    if not entries:
        raise Unreadable("runs: at least one run is needed.")
    if len({entry.model_id for entry in entries}) < len(entries):
        raise Unreadable("runs: each run may be named once.")
    return ParsedSweep(entries, read_sweep_pass(batch))


def joint_ops(
    run: RunRecord, entry: SweepEntry, batch: Op, token_limit: int, max_bytes: int
) -> list[JointOp]:
    """Return the ops of one run. An op above the limits of an empty queue fails in its position."""
    ops = [batch] if entry.step is None else [batch, entry.step]
    return [
        JointOp(run, seq, op.kind, op.body, op.tokens, op.digest)
        for seq, op in enumerate((op.fitting(token_limit, max_bytes) for op in ops), entry.seq)
    ]


def sweep_future(model_id: str, accepted: Sequence[RequestId | Exception]) -> SweepFuture:
    """Return the entry of one run in the answer; nothing was accepted for an unknown run."""
    refused = next((each for each in accepted if isinstance(each, Exception)), None)
    if not accepted:
        refused = RunNotFound()
    if refused:
        return SweepFuture(model_id=model_id, error=str(refused), status_code=status_of(refused))
    return SweepFuture(model_id=model_id, request_ids=[str(each) for each in accepted])


def _entry(number: int, run: wire.SweepRun) -> SweepEntry:
    try:
        address = parse_run_and_seq(
            RunRequest, {"model_id": run.model_id, "seq_id": run.seq_id or None}
        )
    except Unreadable as error:
        raise Unreadable(f"runs[{number}].{error}") from error
    if address.seq_id is None:
        raise Unreadable(f"runs[{number}].seq_id must be 1 or more.")
    step = _step_op(run.adam) if run.HasField("adam") else None
    return SweepEntry(address.model_id, address.seq_id, step)


def _step_op(adam: wire.AdamStep) -> Op:
    def make() -> Op:
        params = AdamParams(**{field: getattr(adam, field) for field in AdamParams.model_fields})
        check_adam(params)
        body = params.model_dump_json().encode()
        return Op(OpKind.OPTIM_STEP, body, 0, digest_of(body))

    return op_or_refusal(make, adam.SerializeToString(deterministic=True))
