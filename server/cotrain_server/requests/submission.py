"""Submission of checked ops to the logs of runs: one op of one run, or the ops of a sweep.

A sweep is one batch for several runs. Each run gets the op of the batch at its own position, and with Adam's parameters
an optimizer step at the next one. Its log then equals that of a run that got both alone. The batch is checked once and
stored once.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from google.protobuf.message import DecodeError

from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import AdamParams, SweepFuture, UntypedAPIFuture
from cotrain_server.errors import Unreadable, status_of
from cotrain_server.http.request_body import field_of
from cotrain_server.requests.pass_head import split_sweep, too_many_runs
from cotrain_server.requests.pass_ops import Op, ParsedPass
from cotrain_server.requests.passes import RunAndSeq, adam_op, op_or_refusal, parse_run_and_seq, start_of_pass
from cotrain_server.services import Services
from cotrain_store.errors import MalformedBody, RunNotFound
from cotrain_store.messages.ids import RequestId, run_id
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord, SessionRecord
from cotrain_store.oplog.joint_intake import JointOp

T = TypeVar("T")


async def submit(
    services: Services, run: RunRecord, seq: int | None, op: Op, idempotency_key: str = ""
) -> UntypedAPIFuture:
    """Append an op to its run's log and return the future of its result.

    An op above the tenant's quotas is appended as one that fails. Without `seq` the op follows all
    earlier requests of the run, and `idempotency_key` identifies repeats.
    """
    quotas = await services.quotas.of(run.tenant)
    op = op.fitting(quotas.tokens, quotas.bytes)
    request_id = await services.intake.submit(
        run, seq, op.kind, op.body, op.tokens, op.digest,
        uses=op.uses, sampler=op.sampler, idempotency_key=idempotency_key,
    )  # fmt: skip
    return UntypedAPIFuture(request_id=request_id, model_id=run.id)


def idempotency_key(request: Request) -> str:
    """Return the key that identifies repeats of a request without a `seq_id`, or "". SDKs send the
    same key with each attempt.
    """
    return field_of(request, b"x-idempotency-key")[:256]


def new_run(
    session: SessionRecord,
    number: int,
    pool: PoolRecord,
    lora: LoraSpec,
    user_metadata: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Return the record of the run with this number in its session."""
    return RunRecord(
        id=run_id(session.id, number), tenant=session.tenant, session=session.id, pool=pool.id,
        base_model=pool.base_model, lora=lora, created_at=time.time(),
        user_metadata=dict(user_metadata or {}),
    )  # fmt: skip


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
        columns = {
            field: _of_each(f"adam.{field}", getattr(runs.adam, field) or (info.default,), len(names))
            for field, info in AdamParams.model_fields.items()
        }
        steps = [_step_op({field: column[at] for field, column in columns.items()}) for at in range(len(names))]
    entries = tuple(map(_entry, range(len(names)), names, seq_ids, steps))
    if len({entry.model_id for entry in entries}) < len(entries):
        raise Unreadable("runs: each run may be named once.")
    message = start_of_pass(batch)
    if message.model_id or message.seq_id:
        raise Unreadable("pass_request must have no model_id and no seq_id: runs has them.")
    return ParsedSweep(entries, ParsedPass.of("", None, batch, message, forward_only=False))


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
        at = parse_run_and_seq(RunAndSeq, {"model_id": model_id, "seq_id": seq_id or None})
    except Unreadable as error:
        raise Unreadable(f"runs[{number}].{error}") from error
    if at.seq_id is None:
        raise Unreadable(f"runs[{number}].seq_id must be 1 or more.")
    return SweepEntry(at.model_id, at.seq_id, step)


def _step_op(numbers: dict[str, float]) -> Op:
    return op_or_refusal(lambda: adam_op(AdamParams(**numbers)), repr(sorted(numbers.items())).encode())
