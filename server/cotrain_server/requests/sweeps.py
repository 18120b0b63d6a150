"""Conversion of one batch for several runs to ops of their logs.

Each run gets the op of the batch at its own position, and with Adam's parameters an optimizer step
at the next one. Its log then equals that of a run that got both alone. The batch is checked once and
stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError

from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import AdamParams, SweepFuture
from cotrain_server.errors import Unreadable, status_of
from cotrain_server.requests.pass_ops import Op, ParsedPass, digest_of
from cotrain_server.requests.pass_scan import split_sweep, too_many_runs
from cotrain_server.requests.pass_validation import check_adam
from cotrain_server.requests.passes import RunRequest, op_or_refusal, parse_run_and_seq, read_sweep_pass
from cotrain_store.errors import MalformedBody, RunNotFound
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.joint_intake import JointOp

T = TypeVar("T")


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
        Unreadable: not the message, with a run without a position, or with a list of another length.
    """
    try:
        head, batch = split_sweep(body)
        runs = wire.SweepRuns.FromString(head)
    except (MalformedBody, DecodeError) as error:
        raise Unreadable(str(error)) from error
    if runs.names.count(",") >= MAX_SWEEP_RUNS:
        raise too_many_runs()
    names = [runs.prefix + name for name in runs.names.split(",")]
    seq_ids = _of_each("seq_ids", runs.seq_ids, len(names))
    steps: Sequence[Op | None] = [None] * len(names)
    if runs.HasField("adam"):
        fields = {
            field: _of_each(f"adam.{field}", getattr(runs.adam, field) or (info.default,), len(names))
            for field, info in AdamParams.model_fields.items()
        }
        steps = [_step_op(dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]
    entries = tuple(map(_entry, range(len(names)), names, seq_ids, steps))
    if len({entry.model_id for entry in entries}) < len(entries):
        raise Unreadable("runs: each run may be named once.")
    return ParsedSweep(entries, read_sweep_pass(batch))


def joint_ops(run: RunRecord, entry: SweepEntry, batch: Op, token_limit: int, max_bytes: int) -> list[JointOp]:
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


def _of_each(field: str, values: Sequence[T], runs: int) -> Sequence[T]:
    """Return a number for each run, of a list that has one for each or one for all. Raises Unreadable."""
    if len(values) not in (1, runs):
        raise Unreadable(f"runs.{field} has {len(values)} numbers, but must have {runs}, or 1.")
    return values if len(values) == runs else [values[0]] * runs


def _entry(number: int, model_id: str, seq_id: int, step: Op | None) -> SweepEntry:
    try:
        address = parse_run_and_seq(RunRequest, {"model_id": model_id, "seq_id": seq_id or None})
    except Unreadable as error:
        raise Unreadable(f"runs[{number}].{error}") from error
    if address.seq_id is None:
        raise Unreadable(f"runs[{number}].seq_id must be 1 or more.")
    return SweepEntry(address.model_id, address.seq_id, step)


def _step_op(numbers: dict[str, float]) -> Op:
    def make() -> Op:
        params = AdamParams(**numbers)
        check_adam(params)
        body = params.model_dump_json().encode()
        return Op(OpKind.OPTIM_STEP, body, 0, digest_of(body))

    return op_or_refusal(make, repr(sorted(numbers.items())).encode())
