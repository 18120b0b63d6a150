"""Parsing of training requests into ops of the log. Pure: bytes in, op out.

The run and the position in its order are read first. The content is then checked against the run's base model. A
request with a known position and invalid content becomes a rejected op, because its client has used that position.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from cotrain.errors import UnsupportedInput
from cotrain.wire.codec import encode_datums, wrap_datums
from cotrain.wire.model import Name, SeqId, SequencedRequest, WireModel
from cotrain.wire.proto.wire_pb2 import ForwardBackwardRequest as PassMessage
from cotrain.wire.rest import LogMetricsRequest, RewindRequest
from cotrain.wire.runs import AdamParams, ForwardBackwardRequest, ForwardRequest, MuonParams, OptimStepRequest
from cotrain_server.errors import Invalid, Unreadable, first_error
from cotrain_server.requests.pass_head import HEAD_BYTES, head_of
from cotrain_server.requests.pass_ops import SMALL_PASS, Op, ParsedPass, canonical, digest_of
from cotrain_server.requests.pass_validation import check_adam, check_steps
from cotrain_store.bodies.pass_body import parse_pass
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import encode
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import MetricsEntry

#: Maximum number of metrics of one run.
MAX_NAMES = 128


class RunAndSeq(WireModel):
    """Run and position of a pass or a step. The server assigns a missing position."""

    model_id: Name
    seq_id: SeqId | None = None


_Position = TypeVar("_Position", SequencedRequest, RunAndSeq)


@dataclass(frozen=True)
class ParsedStep:
    """An optim_step with a known run. Nothing else is checked yet."""

    model_id: str
    seq: int | None  # None: append after all earlier requests of the run
    fields: dict[str, Any]


@dataclass(frozen=True)
class ParsedFields:
    """A save or a load with a known run and position. Nothing else is checked yet."""

    model_id: str
    seq: int
    fields: dict[str, Any]


def read_binary_pass(body: bytes, *, forward_only: bool) -> ParsedPass:
    """Read the run and position of a pass as SDK 0.38 sends it. `pass_op` parses the rest of a large one.

    `forward_only` is set for the endpoint of forward passes.

    Raises:
        Unreadable: not the message, or without a run.
    """
    message = start_of_pass(body)
    if len(body) > SMALL_PASS and not message.model_id:
        raise Unreadable(
            f"model_id must come before the first datum, within the first {HEAD_BYTES} bytes, in a large request."
        )
    seq = message.seq_id or None  # protobuf cannot distinguish a missing number from 0
    at = parse_run_and_seq(RunAndSeq, {"model_id": message.model_id, "seq_id": seq})
    return ParsedPass.of(at.model_id, at.seq_id, body, message, forward_only=forward_only)


def start_of_pass(body: bytes) -> PassMessage:
    """Parse a small pass, or the fields before the first datum of a large one. Raises Unreadable."""
    try:
        return parse_pass(body if len(body) <= SMALL_PASS else head_of(body))
    except MalformedBody as error:
        raise Unreadable(str(error)) from error


def read_json_pass(body: bytes, *, forward_only: bool) -> ParsedPass:
    """Parse a pass as SDK 0.22 sends it, and convert it to the same message.

    Raises:
        Unreadable: not a JSON object, or without a run.
    """
    fields = json_object(body)
    at = parse_run_and_seq(RunAndSeq, fields)
    try:
        message = _pass_message(fields, forward_only=forward_only)
    except ValidationError as error:
        refusal = first_error(error)
    except UnsupportedInput as error:
        refusal = str(error)
    else:
        converted = canonical(message)
        return ParsedPass.of(at.model_id, at.seq_id, converted, message, forward_only=forward_only)
    return ParsedPass(at.model_id, at.seq_id, canonical_json(fields), needs_child=False, refusal=refusal)


def _pass_message(fields: dict[str, Any], *, forward_only: bool) -> PassMessage:
    numbered = _with_default_seq(fields)
    if forward_only:
        content = ForwardRequest.model_validate(numbered).forward_input
    else:
        content = ForwardBackwardRequest.model_validate(numbered).forward_backward_input
    return wrap_datums(
        fields["model_id"],
        fields.get("seq_id") or 0,
        encode_datums(content.data),
        content.loss_fn,
        content.loss_fn_config,
        forward_only=forward_only,
    )


def read_fields(body: bytes) -> ParsedFields:
    """Parse a save or a load. Raises Unreadable if it is not a JSON object, or lacks a run or a position."""
    fields = json_object(body)
    at = parse_run_and_seq(SequencedRequest, fields)
    return ParsedFields(at.model_id, at.seq_id, fields)


def read_step(body: bytes) -> ParsedStep:
    """Parse an optim_step. Raises Unreadable as `read_json_pass` does."""
    fields = json_object(body)
    at = parse_run_and_seq(RunAndSeq, fields)
    return ParsedStep(at.model_id, at.seq_id, fields)


def step_op(request: ParsedStep) -> Op:
    """Check an optim_step and return its op."""
    return op_or_refusal(lambda: _step_op(request.fields), canonical_json(request.fields))


def op_or_refusal(make: Callable[[], Op], content: bytes) -> Op:
    """Return an op, or a rejected op with the reason if `make` raises Invalid or a ValidationError."""
    try:
        return make()
    except ValidationError as error:
        refusal = first_error(error)
    except Invalid as error:
        refusal = str(error)
    return Op.rejected(refusal, content)


def metrics_op(request: ParsedFields, known: Collection[str]) -> Op:
    """Check metrics and return their op. `known` are the names in the run's history."""
    content = canonical_json(request.fields)

    def make() -> Op:
        wanted = LogMetricsRequest.model_validate(request.fields)
        names = {*wanted.metrics, wanted.evaluation or ""} - {"", *known}
        if not wanted.metrics and not wanted.evaluation:
            raise Invalid("metrics is empty: pass a number by name.")
        if len(known) + len(names) > MAX_NAMES:
            raise Invalid(f"metrics: {min(names)!r} would be one name too many. A run may have {MAX_NAMES} of them.")
        entry = MetricsEntry(wanted.metrics, wanted.evaluation or "", wanted.passes)
        return Op(OpKind.METRICS, encode(entry).encode(), 0, digest_of(content))

    return op_or_refusal(make, content)


def rewind_op(request: ParsedFields) -> Op:
    """Check a rewind and return its op. Its worker checks that the log of the run reaches the step."""
    content = canonical_json(request.fields)

    def make() -> Op:
        wanted = RewindRequest.model_validate(request.fields)
        body = json.dumps({"step": wanted.step}).encode()
        return Op(OpKind.REWIND, body, 0, digest_of(content))

    return op_or_refusal(make, content)


def _step_op(fields: dict[str, Any]) -> Op:
    request = OptimStepRequest.model_validate(_with_default_seq(fields))
    if request.adam_params is not None:
        return adam_op(request.adam_params)
    assert request.optimizer_params is not None  # the wire type requires one of them
    check_steps("optimizer_params", request.optimizer_params)
    body = json.dumps(_muon_fields(request.optimizer_params)).encode()
    return Op(OpKind.OPTIM_STEP, body, 0, digest_of(body))


def adam_op(params: AdamParams) -> Op:
    """Check the parameters of an AdamW step and return its op. Raises Invalid."""
    check_adam(params)
    body = params.model_dump_json().encode()
    return Op(OpKind.OPTIM_STEP, body, 0, digest_of(body))


def _muon_fields(params: MuonParams) -> dict[str, Any]:
    """Return the fields of the engine's step; `eps` and `beta2` are AdamW's alone."""
    return {
        "type": params.type, "learning_rate": params.learning_rate, "beta1": params.momentum,
        "beta2": 0.0, "eps": 1e-7, "weight_decay": params.weight_decay,
        "grad_clip_norm": params.grad_clip_norm,
    }  # fmt: skip


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises Unreadable."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise Unreadable(f"The request body is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise Unreadable("The request body is not a JSON object.")
    return fields


def parse_run_and_seq(kind: type[_Position], fields: dict[str, Any]) -> _Position:
    """Parse the run and position of a request. Raises Unreadable if they are missing."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise Unreadable(first_error(error)) from error


def _with_default_seq(fields: dict[str, Any]) -> dict[str, Any]:
    """Fill in the position that the wire models require. The real one is parsed already."""
    return {**fields, "seq_id": fields.get("seq_id") or 1}


def canonical_json(fields: Any) -> bytes:
    """Return JSON with equal bytes for equal fields in any order."""
    return json.dumps(fields, sort_keys=True).encode()
