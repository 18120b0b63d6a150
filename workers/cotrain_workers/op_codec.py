"""Decoder of stored requests into those that the engine runs: logged ops, and claimed sample requests.

`results.py` encodes the outputs of ops. The result of a sample is encoded here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from cotrain.errors import UnsupportedInput
from cotrain.wire.constants import CUSTOM
from cotrain.wire.custom_loss import LOSS_ID, decode_loss, loss_and_metrics
from cotrain_store.bodies.adapter_bodies import LoadRequest, SaveRequest, decode_import
from cotrain_store.bodies.images import BodyImage
from cotrain_store.bodies.pass_body import decoding, parse_pass
from cotrain_store.bodies.reverse_kl_body import decode_reverse_kl
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.ids import RequestId, WeightsRef, decode, run_of
from cotrain_store.messages.ops import OpKind, QueuedOp, Result, ResultKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_workers.checkpoints.files import refuse_recipients
from cotrain_workers.checkpoints.peft_folder import LayoutOf
from cotrain_workers.engine.adapters.lifecycle import mix
from cotrain_workers.engine.coordination import Yielding, run_to_end
from cotrain_workers.engine.decoding.requests import SampleOutput, SampleRequest
from cotrain_workers.engine.ops import (
    Create,
    Datum,
    Failure,
    GraphNode,
    HostOptimizer,
    HostWeights,
    Image,
    Import,
    KlDatum,
    Load,
    LossGraph,
    NoteOutput,
    Op,
    OptimStep,
    Pass,
    PeftAdapter,
    PeftModule,
    ReverseKl,
    Save,
    WeightsMissing,
)
from cotrain_workers.engine.spec import AdapterSpec, seed_of
from cotrain_workers.sample_output import encode_sample_output

if TYPE_CHECKING:
    from cotrain_store.sampling.claims import ClaimedSample  # it loads redis, which a replay does not need


class Checkpoints(Protocol):
    """Checkpoints that a load reads; `host` and `optimizer` raise WeightsMissing."""

    def host(self, ref: WeightsRef) -> HostWeights:
        """Return weights."""

    def optimizer(self, ref: WeightsRef) -> HostOptimizer | None:
        """Return the optimizer state that was saved with weights; None if they were saved without."""


#: Decoded passes by the reference of their body in the spool. Runs of a sweep share bodies.
Decoded: TypeAlias = dict[str, Pass | Failure]


def engine_op(op: QueuedOp, body: bytes, checkpoints: Checkpoints, layout_of: LayoutOf) -> Op | NoteOutput | Failure:
    """Decode one op. The output of an op that does not run: a Failure if it was rejected or cannot be read.

    `layout_of` returns the places of an adapter's matrices in its arena.
    """
    match op.kind:
        case OpKind.CREATE:
            lora = decode(LoraSpec, json.loads(body))
            return Create(op.run, op.seq, AdapterSpec(**asdict(lora)))
        case OpKind.FORWARD | OpKind.FORWARD_BACKWARD:
            return decode_op_pass(op, body)
        case OpKind.REVERSE_KL:
            return _reverse_kl(op, body, checkpoints)
        case OpKind.OPTIM_STEP:
            return OptimStep(op.run, op.seq, **json.loads(body))
        case OpKind.SAVE:
            return _save(op, body)
        case OpKind.LOAD:
            return _load(op, body, checkpoints, layout_of)
        case OpKind.IMPORT:
            return _import(op, body)
        case OpKind.METRICS | OpKind.REWIND:
            return NoteOutput()
        case OpKind.REJECTED:
            rejected = json.loads(body)
            return Failure(rejected["error"], rejected["category"])


def decode_op_pass(op: QueuedOp, body: bytes) -> Pass | Failure:
    """Decode a forward or a forward-backward; the same body always gives the same."""
    return run_to_end(_decoding_op_pass(op, body))


def _decoding_op_pass(op: QueuedOp, body: bytes) -> Yielding[Pass | Failure]:
    try:
        request = yield from decoding(parse_pass(body))
        loss_id = request.loss_config.get(LOSS_ID)
        graph = loss_graph(str(loss_id)) if request.loss_fn == CUSTOM else None
    except (MalformedBody, UnsupportedInput) as malformed:
        return Failure(str(malformed), "user")
    return Pass(
        run=op.run,
        seq=op.seq,
        datums=[
            Datum(datum.tokens, datum.inputs, datum.routed_experts, _images(datum.images)) for datum in request.datums
        ],
        loss_fn=request.loss_fn,
        loss_config={k: v for k, v in request.loss_config.items() if not isinstance(v, str)},
        needs_grad=op.kind is OpKind.FORWARD_BACKWARD,
        graph=graph,
    )


def loss_graph(loss_id: str) -> LossGraph:
    """Return the loss that an id contains. Raises UnsupportedInput."""
    loss = decode_loss(loss_id)
    return LossGraph(
        id=loss_id,
        inputs=[(each.name, each.rank) for each in loss.inputs],
        nodes=[GraphNode(n.op, n.name, n.target, n.args, n.kwargs) for n in loss.graph.nodes],
        metrics=loss_and_metrics(loss)[1],
    )


def decoding_shared_pass(op: QueuedOp, body: bytes, decoded: Decoded) -> Yielding[Pass | Failure]:
    """Decode a pass, with yield points. A pass whose body is in `decoded` shares its arrays; others are added."""
    known = decoded.get(op.ref) or (yield from _decoding_op_pass(op, body))
    if op.ref != "inline":
        decoded[op.ref] = known
    if isinstance(known, Failure) or known.id == op.id:
        return known
    needs_grad = op.kind is OpKind.FORWARD_BACKWARD
    return replace(known, run=op.run, seq=op.seq, needs_grad=needs_grad)


def _images(images: Sequence[BodyImage]) -> list[Image]:
    return [Image(**vars(each)) for each in images]


def _save(op: QueuedOp, body: bytes) -> Save | Failure:
    request = SaveRequest.parse(body)
    reason = refuse_recipients(request.age_recipients)
    if reason:
        return Failure(reason, "user")
    return Save(op.run, op.seq, optimizer=request.kind == "weights")


def _load(op: QueuedOp, body: bytes, checkpoints: Checkpoints, layout_of: LayoutOf) -> Load | Failure:
    """Return a load with its weights; a Failure if they are missing."""
    request = LoadRequest.parse(body)
    try:
        sources = [(each.coefficient, checkpoints.host(each.ref)) for each in request.sources]
        is_whole = len(sources) == 1 and sources[0][0] == 1.0
        weights = sources[0][1] if is_whole else mix(sources, layout_of)
        # A mix of several sources has no optimizer state.
        has_one = request.optimizer and len(sources) == 1
        optimizer = checkpoints.optimizer(request.sources[0].ref) if has_one else None
    except WeightsMissing as missing:
        return _missing(f"Checkpoint {request.path}", missing)
    if request.optimizer and optimizer is None:
        return Failure(f"Checkpoint {request.path} has no optimizer state.", "user")
    kind = request.lora.optimizer if request.lora else "adamw"
    creates = request.lora is not None
    return Load(op.run, op.seq, request.path, weights, optimizer, creates, kind)


def _import(op: QueuedOp, body: bytes) -> Import | Failure:
    try:
        return Import(op.run, op.seq, peft_adapter(body))
    except MalformedBody:
        return Failure("The uploaded adapter cannot be read.", "user")


def peft_adapter(body: bytes) -> PeftAdapter:
    """Decode the adapter in the body of an IMPORT op; raises MalformedBody."""
    adapter = decode_import(body)
    modules = [PeftModule(**asdict(module)) for module in adapter.modules]
    return PeftAdapter(AdapterSpec(**asdict(adapter.lora)), modules, adapter.tensors)


def _reverse_kl(op: QueuedOp, body: bytes, checkpoints: Checkpoints) -> ReverseKl | Failure:
    """Return a reverse KL with the weights of its reference; a Failure if it is malformed or they are missing."""
    try:
        request = decode_reverse_kl(body)
        reference = None if request.reference is None else checkpoints.host(request.reference)
    except MalformedBody as malformed:
        return Failure(str(malformed), "user")
    except WeightsMissing as missing:
        return _missing("The weights of the reference", missing)
    datums = [
        KlDatum(datum.student_tokens, datum.reference_tokens, datum.weights, datum.routed_experts)
        for datum in request.datums
    ]
    return ReverseKl(op.run, op.seq, datums, reference, request.temperature)


def _missing(subject: str, missing: WeightsMissing) -> Failure:
    reason = f": {missing.reason}" if missing.reason else "."
    return Failure(f"{subject} cannot be read on the server{reason}", "server")


def sample_request(claimed: ClaimedSample, body: SampleBody, end_of_sequence: Iterable[int]) -> SampleRequest:
    """Return the decoder's request, with defaults for missing fields.

    A missing seed is derived from the request's id, so that a repeated request yields the same tokens.
    """
    tokens, strings = _stops(body.stop, end_of_sequence)
    targets = body.target_prompt_logprobs
    return SampleRequest(
        id=claimed.request,
        weights=claimed.weights,
        prompt=np.array(body.prompt, np.int64),
        num_samples=body.num_samples,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=seed_of(claimed.request) if body.seed is None else body.seed,
        stop_tokens=tokens,
        stop_strings=strings,
        prompt_logprobs=body.prompt_logprobs,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        target_prompt_logprobs=None if targets is None else targets.matrix,
        grammar=body.grammar,
        images=_images(body.images),
        return_routed_experts=body.return_routed_experts,
        tenant=claimed.tenant,
        tenant_weight=claimed.tenant_weight,
        policy_step=body.policy_step,
    )


def sample_result(request: SampleRequest, output: SampleOutput) -> Result:
    """Return the encoded result of a sample request."""
    run = run_of(RequestId(request.weights)) if request.weights else None
    return Result(ResultKind.SAMPLE, encode_sample_output(output, run, request.policy_step))


def _stops(
    stop: tuple[str, ...] | tuple[int, ...] | None, end_of_sequence: Iterable[int]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the tokens and strings that end a sequence: the given ones and the model's own end of sequence.

    An empty `stop` ends at neither, and None at the model's own alone.
    """
    if stop == ():
        return frozenset(), ()
    given = stop or ()
    tokens = frozenset(one for one in given if isinstance(one, int))
    return tokens | frozenset(end_of_sequence), tuple(one for one in given if isinstance(one, str))
