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
from cotrain_server.requests.pass_scan import TooManyObjects, strip_unknown_fields
from cotrain_server.requests.pass_validation import check_pass
from cotrain_store.bodies.pass_body import decode_pass, has_images, locate_images, parse_pass
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import SamplerId, WeightsRef
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import PoolRecord

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
    """A forward or forward_backward request with a known run and position."""

    model_id: str
    seq: int | None  # None: append after all earlier requests of the run
    message: PassMessage | None
    """The content of the pass; None if it is invalid (`refusal` gives the reason)."""
    refusal: str
    content: bytes
    """Canonical bytes of the request, equal for every encoding. Its digest is computed from them."""
    forward_only: bool = False  # endpoint of a pass that is not parsed yet
    is_read: bool = True
    """False: more than FEW_FIELDS; `content` is as it was sent, and `pass_op` parses it."""
    sent: bytes = b""
    """Pass as it was sent, if it is stored so instead of `content`: then no process returns it to another one."""
    has_images: bool = False
    """True: `pass_op` decodes images, which only a child process may do. Unknown before it is parsed."""

    @classmethod
    def of(cls, model_id: str, seq: int | None, message: PassMessage) -> Self:
        """Return the request of a message."""
        return cls(model_id, seq, message, "", _canonical(message), has_images=has_images(message))


def pass_op(request: ParsedPass, pool: PoolRecord) -> Op:
    """Check a pass against its run's base model and return its op. Parse it first if necessary."""
    if not request.is_read:
        request = _read_all(request)
    if request.message is None:
        return Op.rejected(request.refusal, request.content)
    try:
        _refuse_vast_shapes(request.message)
        body = request.sent or request.content
        if request.has_images:
            locate_images(request.message, image_reader(pool, "data"))
            body = _canonical(request.message)
        decoded = decode_pass(request.message)
        tokens = check_pass(decoded, pool)
    except (Invalid, MalformedBody) as error:
        return Op.rejected(str(error), request.content)
    kind = OpKind.FORWARD if decoded.forward_only else OpKind.FORWARD_BACKWARD
    return Op(kind, body, tokens, digest_of(request.content))


def pass_op_apart(request: ParsedPass, pool: PoolRecord) -> tuple[Op, bool]:
    """Return the op of `pass_op` for a caller in another process, and True if its body is the content of the request.
    Such an op has no body: the pipe would take a tenth of the time of the check.
    """
    op = pass_op(request, pool)
    is_sent = op.body == request.content
    return (replace(op, body=b""), True) if is_sent else (op, False)


def _read_all(request: ParsedPass) -> ParsedPass:
    """Parse a pass whose head is known. If that fails, the result carries the reason."""
    try:
        lean = strip_unknown_fields(request.content)
        message = parse_pass(lean)
    except (TooManyObjects, MalformedBody) as error:
        return replace(request, refusal=str(error), is_read=True)
    if (message.model_id, message.seq_id) != (request.model_id, request.seq or 0):
        return replace(request, refusal="model_id and seq_id: given twice.", is_read=True)
    is_sent = lean is request.content and message.forward_only >= request.forward_only
    message.forward_only |= request.forward_only
    return replace(ParsedPass.of(request.model_id, request.seq, message), sent=lean if is_sent else b"")


def _refuse_vast_shapes(message: PassMessage) -> None:
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


def _failure(message: str) -> bytes:
    return json.dumps({"error": message, "category": "user"}).encode()


def _canonical(message: PassMessage) -> bytes:
    """Return equal bytes for equal passes."""
    return message.SerializeToString(deterministic=True)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of the content."""
    return hashlib.sha256(content).hexdigest()
