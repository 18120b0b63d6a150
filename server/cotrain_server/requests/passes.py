"""Parsing of training requests into ops of the log. Pure: bytes in, op out.

The run and the position in its order are read first. The content is then checked against the run's
base model. A request with a known position and invalid content becomes a rejected op, because its
client has used that position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from cotrain.errors import UnsupportedInput
from cotrain.wire.model import Name, SeqId, SequencedRequest, WireModel
from cotrain.wire.pass_codec import encode_pass_request
from cotrain.wire.proto.wire_pb2 import ForwardBackwardRequest as PassMessage
from cotrain.wire.rest import LogMetricsRequest, RewindRequest
from cotrain.wire.runs import (
    ForwardBackwardRequest,
    ForwardRequest,
    MuonParams,
    OptimStepRequest,
)
from cotrain_server.errors import Invalid, Unreadable, sentence
from cotrain_server.parsing.parser import CHILD_ABOVE, JSON_VALUE_WEIGHT
from cotrain_server.requests.images import image_reader
from cotrain_server.requests.pass_scan import (
    HEAD_BYTES,
    TooManyObjects,
    head_of,
    strip_unknown_fields,
)
from cotrain_server.requests.pass_validation import check_adam, check_pass, check_steps
from cotrain_store.bodies.pass_body import decode_pass, has_images, locate_images, parse_pass
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import SamplerId, WeightsRef, encode
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import MetricsEntry, PoolRecord

#: Limit on sparse tensors, which are small on the wire and expanded here: this many elements take
#: 64 to 128 MiB.
MAX_SPARSE_ELEMENTS = 1 << 24
#: A loss uses one or two axes. The product of millions of axes would take minutes.
MAX_AXES = 8
#: Maximum number of metrics of one run.
MAX_NAMES = 128
#: Fields that are parsed at once: 1,500 datums with three inputs. A field takes as long as a JSON
#: value. A larger pass is parsed in a child process.
FEW_FIELDS = CHILD_ABOVE // JSON_VALUE_WEIGHT


class RunRequest(WireModel):
    """Run and position of a pass or a step. The server assigns a missing position."""

    model_id: Name
    seq_id: SeqId | None = None


_Address = TypeVar("_Address", SequencedRequest, RunRequest)


@dataclass(frozen=True)
class Op:
    """Argument of `Intake.submit`."""

    kind: OpKind
    body: bytes
    tokens: int
    digest: str
    """Digest of the request as sent, not of the checkpoints that its paths named: a repeat is the
    same request.
    """
    uses: tuple[WeightsRef, ...] = ()  # weights that must be kept while the log needs this op
    sampler: SamplerId | None = None  # sampler that a save without a name creates

    @classmethod
    def rejected(cls, message: str, content: bytes) -> Self:
        """Return an op that only occupies its position and fails with this message."""
        return cls(OpKind.REJECTED, _failure(message), 0, digest_of(content))

    def refused(self, message: str) -> Op:
        """Return a failing op for the position of this one, which may not run."""
        return Op(OpKind.REJECTED, _failure(message), 0, self.digest)

    def fitting(self, token_limit: int, max_bytes: int) -> Op:
        """Return this op, or a rejected op if it exceeds the limits of an empty queue.

        The client of an op that never fits would otherwise retry without end.
        """
        for size, most, unit in (
            (self.tokens, token_limit, "tokens"),
            (len(self.body), max_bytes, "bytes"),
        ):
            if size > most:
                return self.refused(
                    f"data has {size} {unit}; of one tenant no more than {most} may wait at once. "
                    "Send it in several calls."
                )
        return self


@dataclass(frozen=True)
class ParsedPass:
    """A forward or forward_backward request with a known run and position."""

    model_id: str
    seq: int | None  # None: append after all earlier requests of the run
    message: PassMessage | None
    """The content of the pass; None if it is invalid (`refusal` gives the reason)."""
    refusal: str
    content: bytes
    """Canonical bytes of the request, equal for every encoding. Its digest is computed from them.
    """
    forward_only: bool = False  # endpoint of a pass that is not parsed yet
    is_read: bool = True
    """False: more than FEW_FIELDS; `content` is as it was sent, and `pass_op` parses it."""
    has_images: bool = False
    """True: `pass_op` decodes images, which only a child process may do. Unknown before it is parsed."""


@dataclass(frozen=True)
class AddressedStep:
    """An optim_step with a known run. Nothing else is checked yet."""

    model_id: str
    seq: int | None  # None: append after all earlier requests of the run
    fields: dict[str, Any]


@dataclass(frozen=True)
class AddressedFields:
    """A save or a load with a known run and position. Nothing else is checked yet."""

    model_id: str
    seq: int
    fields: dict[str, Any]


def read_binary_pass(
    body: bytes, *, forward_only: bool, max_fields: int = FEW_FIELDS
) -> ParsedPass:
    """Parse a pass as SDK 0.38 sends it. `forward_only` is set for the endpoint of forward passes.

    If it has more than `max_fields`, only its head is parsed, and `pass_op` parses the rest.

    Raises:
        Unreadable: not the message, or without a run.
    """
    try:
        message = parse_pass(strip_unknown_fields(body, max_fields))
    except TooManyObjects:
        return _read_head(body, forward_only=forward_only)
    except MalformedBody as error:
        raise Unreadable(str(error)) from error
    address = _address_in(message)
    message.forward_only |= forward_only
    return _parsed(address, message, "", _canonical(message))


def _parsed(
    address: RunRequest, message: PassMessage | None, refusal: str, content: bytes
) -> ParsedPass:
    with_images = message is not None and has_images(message)
    return ParsedPass(
        address.model_id, address.seq_id, message, refusal, content, has_images=with_images
    )


def read_sweep_pass(body: bytes) -> ParsedPass:
    """Parse the pass of a sweep, which names no run. `pass_op` parses one with more than FEW_FIELDS.

    Raises:
        Unreadable: not the message, or with a run of its own.
    """
    try:
        message = parse_pass(strip_unknown_fields(body, FEW_FIELDS))
    except TooManyObjects:
        return ParsedPass("", None, None, "", body, is_read=False)
    except MalformedBody as error:
        raise Unreadable(str(error)) from error
    if message.model_id or message.seq_id:
        raise Unreadable("pass_request must have no model_id and no seq_id: runs has them.")
    content = _canonical(message)
    return ParsedPass("", None, message, "", content, has_images=has_images(message))


def _read_head(body: bytes, *, forward_only: bool) -> ParsedPass:
    try:
        message = parse_pass(head_of(body))
    except MalformedBody as error:
        raise Unreadable(str(error)) from error
    if not message.model_id:
        raise Unreadable(
            f"model_id must come before the first datum, within the first {HEAD_BYTES} bytes, in a large request."
        )
    address = _address_in(message)
    return ParsedPass(address.model_id, address.seq_id, None, "", body, forward_only, is_read=False)


def _address_in(message: PassMessage) -> RunRequest:
    seq = message.seq_id or None  # protobuf cannot distinguish a missing number from 0
    return parse_run_and_seq(RunRequest, {"model_id": message.model_id, "seq_id": seq})


def read_json_pass(body: bytes, *, forward_only: bool) -> ParsedPass:
    """Parse a pass as SDK 0.22 sends it, and convert it to the same message.

    Raises:
        Unreadable: not a JSON object, or without a run.
    """
    fields = json_object(body)
    address = parse_run_and_seq(RunRequest, fields)
    message, refusal = None, ""
    try:
        message = _pass_message(fields, forward_only=forward_only)
    except ValidationError as error:
        refusal = sentence(error.errors(include_url=False, include_input=False))
    except UnsupportedInput as error:
        refusal = str(error)
    content = canonical_json(fields) if message is None else _canonical(message)
    return _parsed(address, message, refusal, content)


def read_fields(body: bytes) -> AddressedFields:
    """Parse a save or a load. Raises Unreadable if it is not a JSON object, or lacks a run or a
    position.
    """
    fields = json_object(body)
    address = parse_run_and_seq(SequencedRequest, fields)
    return AddressedFields(address.model_id, address.seq_id, fields)


def read_step(body: bytes) -> AddressedStep:
    """Parse an optim_step. Raises Unreadable as `read_json_pass` does."""
    fields = json_object(body)
    address = parse_run_and_seq(RunRequest, fields)
    return AddressedStep(address.model_id, address.seq_id, fields)


def pass_op(request: ParsedPass, pool: PoolRecord) -> Op:
    """Check a pass against its run's base model and return its op. Parse it first if necessary."""
    if not request.is_read:
        request = _read_all(request)
    if request.message is None:
        return Op.rejected(request.refusal, request.content)
    try:
        _refuse_vast_shapes(request.message)
        body = request.content
        if has_images(request.message):
            locate_images(request.message, image_reader(pool, "data"))
            body = _canonical(request.message)
        decoded = decode_pass(request.message)
        tokens = check_pass(decoded, pool)
    except (Invalid, MalformedBody) as error:
        return Op.rejected(str(error), request.content)
    kind = OpKind.FORWARD if decoded.forward_only else OpKind.FORWARD_BACKWARD
    return Op(kind, body, tokens, digest_of(request.content))


def _read_all(request: ParsedPass) -> ParsedPass:
    """Parse a pass whose head is known. If that fails, the result carries the reason."""
    try:
        message = parse_pass(strip_unknown_fields(request.content))
    except (TooManyObjects, MalformedBody) as error:
        return replace(request, refusal=str(error), is_read=True)
    if (message.model_id, message.seq_id) != (request.model_id, request.seq or 0):
        return replace(request, refusal="model_id and seq_id: given twice.", is_read=True)
    message.forward_only |= request.forward_only
    return replace(request, message=message, content=_canonical(message), is_read=True)


def step_op(request: AddressedStep) -> Op:
    """Check an optim_step and return its op."""
    return op_or_refusal(lambda: _step_op(request.fields), canonical_json(request.fields))


def op_or_refusal(make: Callable[[], Op], content: bytes) -> Op:
    """Return an op, or a rejected op with the reason if `make` raises Invalid or a ValidationError."""
    try:
        return make()
    except ValidationError as error:
        refusal = sentence(error.errors(include_url=False, include_input=False))
    except Invalid as error:
        refusal = str(error)
    return Op.rejected(refusal, content)


def metrics_op(request: AddressedFields, known: Collection[str]) -> Op:
    """Check metrics and return their op. `known` are the names in the run's history."""
    content = canonical_json(request.fields)

    def make() -> Op:
        wanted = LogMetricsRequest.model_validate(request.fields)
        names = {*wanted.metrics, wanted.evaluation or ""} - {"", *known}
        if not wanted.metrics and not wanted.evaluation:
            raise Invalid("metrics is empty: pass a number by name.")
        if len(known) + len(names) > MAX_NAMES:
            raise Invalid(
                f"metrics: {min(names)!r} would be one name too many. A run may have {MAX_NAMES} of them."
            )
        entry = MetricsEntry(wanted.metrics, wanted.evaluation or "", wanted.passes)
        return Op(OpKind.METRICS, encode(entry).encode(), 0, digest_of(content))

    return op_or_refusal(make, content)


def rewind_op(request: AddressedFields) -> Op:
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
        check_adam(request.adam_params)
        body = request.adam_params.model_dump_json().encode()
    else:
        assert request.optimizer_params is not None  # the wire type requires one of them
        check_steps("optimizer_params", request.optimizer_params)
        body = json.dumps(_muon_fields(request.optimizer_params)).encode()
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


def parse_run_and_seq(kind: type[_Address], fields: dict[str, Any]) -> _Address:
    """Parse the run and position of a request. Raises Unreadable if they are missing."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise Unreadable(sentence(error.errors(include_url=False, include_input=False))) from error


def _pass_message(fields: dict[str, Any], *, forward_only: bool) -> PassMessage:
    content = (
        ForwardRequest.model_validate(_with_default_seq(fields)).forward_input
        if forward_only
        else ForwardBackwardRequest.model_validate(_with_default_seq(fields)).forward_backward_input
    )
    return encode_pass_request(
        fields["model_id"],
        fields.get("seq_id") or 0,
        content.data,
        content.loss_fn,
        content.loss_fn_config,
        forward_only=forward_only,
    )


def _with_default_seq(fields: dict[str, Any]) -> dict[str, Any]:
    """Fill in the position that the wire models require. The real one is parsed already."""
    return {**fields, "seq_id": fields.get("seq_id") or 1}


def _refuse_vast_shapes(message: PassMessage) -> None:
    claimed = 0
    for number, datum in enumerate(message.data):
        for name, tensor in datum.loss_fn_inputs.items():
            if len(tensor.shape) > MAX_AXES:
                raise Invalid(
                    f"data[{number}].loss_fn_inputs.{name} has {len(tensor.shape)} axes. "
                    f"The limit is {MAX_AXES}."
                )
            if tensor.HasField("sparse_csr"):
                claimed += abs(prod(tensor.shape))
            if claimed > MAX_SPARSE_ELEMENTS:
                raise Invalid(
                    f"data[{number}].loss_fn_inputs.{name}: the sparse tensors of one request may "
                    f"span at most {MAX_SPARSE_ELEMENTS} elements."
                )


def _failure(message: str) -> bytes:
    return json.dumps({"error": message, "category": "user"}).encode()


def _canonical(message: PassMessage) -> bytes:
    return message.SerializeToString(deterministic=True)


def canonical_json(fields: Any) -> bytes:
    """Return JSON with equal bytes for equal fields in any order."""
    return json.dumps(fields, sort_keys=True).encode()


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of the content."""
    return hashlib.sha256(content).hexdigest()
