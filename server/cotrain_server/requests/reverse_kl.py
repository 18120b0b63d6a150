"""Conversion of a reverse KL request to an op of the log. Pure: the request and the resolved path in, op out."""

import math
from dataclasses import dataclass, replace

import numpy as np
from pydantic import ValidationError

from cotrain.errors import UnsupportedInput
from cotrain.wire.runs import ReverseKlDatum, ReverseKlRequest
from cotrain.wire.tensors import TensorData
from cotrain_server.errors import Invalid, first_error
from cotrain_server.requests.pass_ops import Op, digest_of
from cotrain_server.requests.pass_validation import check_experts, check_finite, check_tokens, refuse_too_long
from cotrain_server.requests.passes import RunAndSeq, canonical_json, json_object, parse_run_and_seq
from cotrain_store.bodies.reverse_kl_body import KlArrays, ReverseKlBody, encode_reverse_kl
from cotrain_store.messages.ids import WeightsRef
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import PoolRecord


@dataclass(frozen=True)
class ParsedKl:
    """A reverse KL request with a known run. Nothing is checked against its base model yet."""

    model_id: str
    seq: int | None  # None: append after all earlier requests of the run
    reference_path: str | None
    """The reference's path or base model; None if the field is not a string."""
    body: ReverseKlBody | None
    """The content without its reference; None if it is invalid (`refusal` gives the reason)."""
    refusal: str
    content: bytes  # canonical bytes, equal for equal requests


def read_reverse_kl(content: bytes) -> ParsedKl:
    """Parse a reverse KL request. Raises Unreadable if it does not name its run."""
    fields = json_object(content)
    at = parse_run_and_seq(RunAndSeq, fields)
    path = fields.get("reference_model_path")
    body, refusal = None, ""
    try:
        wanted = ReverseKlRequest.model_validate(fields)
        datums = tuple(_arrays(number, datum) for number, datum in enumerate(wanted.data))
        body = ReverseKlBody(None, wanted.temperature, datums)
    except ValidationError as error:
        refusal = first_error(error)
    except (Invalid, UnsupportedInput) as error:
        refusal = str(error)
    return ParsedKl(
        at.model_id, at.seq_id, path if isinstance(path, str) else None, body, refusal, canonical_json(fields)
    )


def reverse_kl_op(request: ParsedKl, reference: WeightsRef | None, pool: PoolRecord) -> Op:
    """Check a reverse KL against its run's base model and return its op.

    `reference` is the weights that its path names; None is the base model alone.
    """
    if request.body is None:
        return Op.rejected(request.refusal, request.content)
    body = replace(request.body, reference=reference)
    try:
        _check_body(body, pool)
    except Invalid as error:
        return Op.rejected(str(error), request.content)
    uses = () if reference is None else (reference,)
    digest = digest_of(request.content)
    return Op(OpKind.REVERSE_KL, encode_reverse_kl(body), body.num_tokens, digest, uses)


def _arrays(number: int, datum: ReverseKlDatum) -> KlArrays:
    return KlArrays(
        student_context=np.asarray(datum.student_input.to_ints(), np.int64),
        reference_context=np.asarray(datum.reference_input.to_ints(), np.int64),
        targets=_row(f"data[{number}].target_tokens", datum.target_tokens, "int64"),
        weights=_row(f"data[{number}].weights", datum.weights, "float32"),
        routed_experts=None if datum.routed_experts is None else datum.routed_experts.to_numpy(),
    )


def _row(where: str, tensor: TensorData, dtype: str) -> np.ndarray:
    if tensor.is_sparse or len(tensor.dense_shape) != 1:
        raise Invalid(f"{where} must be a dense row; its shape is {tensor.dense_shape}.")
    if tensor.dtype != dtype:
        raise Invalid(f"{where} must be of dtype {dtype}, not {tensor.dtype}.")
    with np.errstate(over="ignore"):  # to infinity, which is refused
        return np.asarray(tensor.data).astype(dtype)


def _check_body(body: ReverseKlBody, pool: PoolRecord) -> None:
    if not body.datums:
        raise Invalid("data is empty; send at least one datum.")
    if not 0 < body.temperature < math.inf:
        raise Invalid("temperature must be positive and finite.")
    for number, datum in enumerate(body.datums):
        _check_lengths(number, datum, pool)
    for what, ids in (
        ("Student token", [datum.student_context for datum in body.datums]),
        ("Reference token", [datum.reference_context for datum in body.datums]),
        ("Target token", [datum.targets for datum in body.datums]),
    ):
        check_tokens(what, ids, pool.vocab_size)
    check_finite("weights", [datum.weights for datum in body.datums])


def _check_lengths(number: int, datum: KlArrays, pool: PoolRecord) -> None:
    targets, weights = len(datum.targets), len(datum.weights)
    if targets == 0:
        raise Invalid(f"data[{number}].target_tokens is empty.")
    if weights != targets:
        raise Invalid(f"data[{number}].weights has {weights} values for {targets} target_tokens.")
    for name, context in (("student_input", datum.student_context), ("reference_input", datum.reference_context)):
        length = len(context) + targets - 1
        if len(context) == 0:
            raise Invalid(f"data[{number}].{name} is empty; the first target needs a context.")
        if length > pool.context_length:
            raise Invalid(
                f"data[{number}].{name} and target_tokens have {length + 1} tokens; "
                f"{pool.base_model} reads {pool.context_length} before the last."
            )
        refuse_too_long(f"data[{number}].{name} and target_tokens have", length, pool)
    if datum.routed_experts is not None:
        length = len(datum.student_tokens)
        check_experts(f"data[{number}].routed_experts", datum.routed_experts, length, pool)
