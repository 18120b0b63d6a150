"""Turn logged ops and their bodies into what the engine runs, and its outputs into results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cotrain_store.bodies.pass_body import decode_pass, encode_pass_output, parse_pass
from cotrain_store.errors import MalformedBody
from cotrain_store.messages.encoding import decode
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.messages.saves import SaveRequest
from cotrain_workers.checkpoints.encrypted_export import refuse_recipients
from cotrain_workers.engine.ops import (
    Create,
    CreateOutput,
    Datum,
    Failure,
    Import,
    LoadOutput,
    Op,
    OptimStep,
    Output,
    Pass,
    PassOutput,
    ReverseKlOutput,
    Save,
    SaveOutput,
    StepOutput,
)
from cotrain_workers.engine.spec import AdapterSpec
from cotrain_workers.op_codec.loads import load_op
from cotrain_workers.op_codec.reverse_kl import answer_of, reverse_kl_op

if TYPE_CHECKING:
    from cotrain_store.messages.ops import QueuedOp
    from cotrain_workers.op_codec.loads import Checkpoints

CYCLE_METRIC = "clock_cycle:unique"


def engine_op(op: QueuedOp, body: bytes, checkpoints: Checkpoints) -> Op | Failure:
    """Decode one op; a Failure when it was rejected at the door or cannot be read."""
    match op.kind:
        case OpKind.CREATE:
            lora = decode(LoraSpec, json.loads(body))
            return Create(
                op.run,
                op.seq,
                AdapterSpec(
                    rank=lora.rank,
                    seed=lora.seed,
                    train_attn=lora.train_attn,
                    train_mlp=lora.train_mlp,
                    train_unembed=lora.train_unembed,
                    alpha=lora.alpha,
                ),
            )
        case OpKind.FORWARD | OpKind.FORWARD_BACKWARD:
            return decode_op_pass(op, body)
        case OpKind.REVERSE_KL:
            return reverse_kl_op(op, body, checkpoints)
        case OpKind.OPTIM_STEP:
            return OptimStep(op.run, op.seq, **json.loads(body))
        case OpKind.SAVE:
            return _save(op, body)
        case OpKind.LOAD:
            return load_op(op, body, checkpoints)
        case OpKind.IMPORT:
            return Import(op.run, op.seq, body)
        case OpKind.REJECTED:
            rejected = json.loads(body)
            return Failure(rejected["error"], rejected["category"])


def decode_op_pass(op: QueuedOp, body: bytes) -> Pass | Failure:
    """Decode a forward or a forward-backward; the same body always gives the same."""
    try:
        request = decode_pass(parse_pass(body))
    except MalformedBody as malformed:
        return Failure(str(malformed), "user")
    return Pass(
        run=op.run,
        seq=op.seq,
        datums=[Datum(datum.tokens, datum.inputs) for datum in request.datums],
        loss_fn=request.loss_fn,
        loss_config={k: v for k, v in request.loss_config.items() if not isinstance(v, str)},
        needs_grad=op.kind is OpKind.FORWARD_BACKWARD,
    )


def _save(op: QueuedOp, body: bytes) -> Save | Failure:
    request = SaveRequest.parse(body)
    reason = refuse_recipients(request.age_recipients)
    if reason:
        return Failure(reason, "user")
    return Save(op.run, op.seq, optimizer=request.kind == "weights")


def result_of(op: QueuedOp, output: Output, cycle: int) -> Result:
    """Encode what an op's future resolves to. Every training result says in which cycle it ran."""
    match output:
        case PassOutput(logprobs, loss_sum):
            metrics = {"loss:sum": loss_sum, CYCLE_METRIC: float(cycle)}
            return Result(ResultKind.PASS, encode_pass_output(logprobs, metrics))
        case ReverseKlOutput():
            return Result.of_json(answer_of(output, {CYCLE_METRIC: float(cycle)}))
        case StepOutput(grad_norm):
            metrics = {"grad_norm": grad_norm, CYCLE_METRIC: float(cycle)}
            return Result.of_json({"metrics": metrics})
        case CreateOutput():
            return Result.of_json({"model_id": op.run, "type": "create_model"})
        case LoadOutput(path):
            return Result.of_json({"path": path, "model_id": op.run, "type": "load_weights"})
        case SaveOutput():
            raise AssertionError("what a save resolves to is made with its records")
        case Failure(message, category):
            return Result.failed(message, category)
