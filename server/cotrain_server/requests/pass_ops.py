"""Check of a pass against its run's base model, and its op for the log. Pure.

Child processes run it, and start for a burst of large passes. So this module imports no model of the wire.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from math import prod
from typing import Self

from cotrain.wire.proto.wire_pb2 import ForwardBackwardRequest as PassMessage
from cotrain_server.errors import Invalid
from cotrain_server.requests.images import image_reader
from cotrain_server.requests.pass_validation import check_pass
from cotrain_store.bodies.pass_body import decode_pass, has_images, locate_images, parse_pass
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import SamplerId, WeightsRef
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import PoolRecord

#: Size in bytes above which a child process parses a pass. The event loop parses a smaller one, in at most 20 ms.
SMALL_PASS = 16 * 1024
#: Limit that `client/config` sends to SDKs, which split larger calls (`fwdbwd_max_chunk_len`). Our
#: client applies it on its own.
MAX_DATUMS = 65_536
MAX_SETTINGS = 64
#: Limit on sparse tensors, which are small on the wire and expanded here: this many elements take 64 to 128 MiB.
MAX_SPARSE_ELEMENTS = 1 << 24
#: A small sparse tensor takes ten times as long to decode as a dense one.
MAX_SPARSE_TENSORS = 1 << 15
#: Inputs of one datum, twice those of the largest custom loss. Decoding can pause only between two datums.
MAX_INPUTS = 32
#: A loss uses one or two axes. The product of millions of axes would take minutes.
MAX_AXES = 8


@dataclass(frozen=True)
class Op:
    """Argument of `Intake.submit`."""

    kind: OpKind
    body: bytes
    tokens: int
    digest: str
    """Digest of the request as sent, not of the checkpoints that its paths named: a repeat is the same request."""
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
        for size, most, unit in ((self.tokens, token_limit, "tokens"), (len(self.body), max_bytes, "bytes")):
            if size > most:
                return self.refused(
                    f"data has {size} {unit}; of one tenant no more than {most} may wait at once. "
                    "Send it in several calls."
                )
        return self


@dataclass(frozen=True)
class ParsedPass:
    """A forward or forward_backward request with a known run and position. Its content is not checked yet."""

    model_id: str
    seq: int | None  # None: append after all earlier requests of the run
    body: bytes  # the message as it was sent, or as it was converted from JSON
    forward_only: bool = False  # set by the endpoint of forward passes
    needs_child: bool = True
    """True if only a child process may parse the body: it is large, or has images or sparse tensors to expand."""
    refusal: str = ""  # reason why the request is invalid; `body` then only identifies it

    @classmethod
    def of(cls, model_id: str, seq: int | None, body: bytes, message: PassMessage, *, forward_only: bool) -> Self:
        """Return the request of a body and its message, or of the start of its message if it is large."""
        needs_child = len(body) > SMALL_PASS or has_images(message) or _has_sparse(message)
        return cls(model_id, seq, body, forward_only, needs_child)


def pass_op(request: ParsedPass, pool: PoolRecord) -> Op:
    """Check a pass against its run's base model and return its op."""
    if request.refusal:
        return Op.rejected(request.refusal, request.body)
    content = request.body
    try:
        message = parse_pass(request.body)
        _check_counts(message)
        _check_run_and_seq(message, request)
        is_changed = _drop_unread(message, forward_only=request.forward_only)
        content = canonical(message)
        body = content if is_changed else request.body
        if has_images(message):
            locate_images(message, image_reader(pool, "data"))
            body = canonical(message)
        decoded = decode_pass(message)
        tokens = check_pass(decoded, pool)
    except (Invalid, MalformedBody) as error:
        return Op.rejected(str(error), content)
    kind = OpKind.FORWARD if decoded.forward_only else OpKind.FORWARD_BACKWARD
    return Op(kind, body, tokens, digest_of(content))


def pass_op_in_child(request: ParsedPass, pool: PoolRecord) -> Op:
    """Return the op of `pass_op` for a caller in another process. Its body is empty if it equals that of the request.

    Sending an unchanged body back through the pipe would take a tenth of the time of the check.
    """
    op = pass_op(request, pool)
    return replace(op, body=b"") if op.body is request.body else op


def _has_sparse(message: PassMessage) -> bool:
    tensors = (tensor for datum in message.data for tensor in datum.loss_fn_inputs.values())
    return any(tensor.HasField("sparse_csr") for tensor in tensors)


def _check_run_and_seq(message: PassMessage, request: ParsedPass) -> None:
    if (message.model_id, message.seq_id) != (request.model_id, request.seq or 0):
        raise Invalid("model_id and seq_id: given twice.")


def _drop_unread(message: PassMessage, *, forward_only: bool) -> bool:
    """Drop the fields that are not read, and set `forward_only`. Return True if the message is changed."""
    was_forward_only, sent_bytes = message.forward_only, message.ByteSize()
    message.DiscardUnknownFields()
    for datum in message.data:
        datum.ClearField("model_input_spans")
        datum.ClearField("loss_fn_input_spans")
    message.forward_only |= forward_only
    return message.ByteSize() != sent_bytes or message.forward_only != was_forward_only


def _check_counts(message: PassMessage) -> None:
    """Check the numbers of objects in a message, which are unlimited in its bytes. Raises Invalid."""
    _check_count("data", len(message.data), MAX_DATUMS, "datums")
    _check_count("model_input", sum(len(datum.model_input) for datum in message.data), 4 * MAX_DATUMS, "chunks")
    _check_count("loss_fn_inputs", sum(len(datum.loss_fn_inputs) for datum in message.data), 4 * MAX_DATUMS, "tensors")
    settings = len(message.loss_fn_config) + len(message.loss_fn_config_v2)
    _check_count("loss_fn_config", settings, MAX_SETTINGS, "settings")
    claimed = sparse = 0
    for number, datum in enumerate(message.data):
        if len(datum.loss_fn_inputs) > MAX_INPUTS:
            raise Invalid(
                f"data[{number}].loss_fn_inputs has {len(datum.loss_fn_inputs)} tensors. The limit is "
                f"{MAX_INPUTS}. Send only those that the loss reads."
            )
        for name, tensor in datum.loss_fn_inputs.items():
            if len(tensor.shape) > MAX_AXES:
                raise Invalid(
                    f"data[{number}].loss_fn_inputs.{name} has {len(tensor.shape)} axes. The limit is {MAX_AXES}."
                )
            if tensor.HasField("sparse_csr"):
                claimed += abs(prod(tensor.shape))
                sparse += 1
            if claimed > MAX_SPARSE_ELEMENTS:
                raise Invalid(
                    f"data[{number}].loss_fn_inputs.{name}: the sparse tensors of one request may "
                    f"span at most {MAX_SPARSE_ELEMENTS} elements."
                )
            if sparse > MAX_SPARSE_TENSORS:
                raise Invalid(
                    f"data[{number}].loss_fn_inputs.{name}: one request may have at most "
                    f"{MAX_SPARSE_TENSORS} sparse tensors. Send it in several calls, or as dense tensors."
                )


def _check_count(field: str, count: int, most: int, unit: str) -> None:
    if count > most:
        raise Invalid(f"{field}: one request holds at most {most} {unit}. Send it in several calls.")


def _failure(message: str) -> bytes:
    return json.dumps({"error": message, "category": "user"}).encode()


def canonical(message: PassMessage) -> bytes:
    """Return equal bytes for equal passes."""
    return message.SerializeToString(deterministic=True)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of the content."""
    return hashlib.sha256(content).hexdigest()
