from __future__ import annotations

import json

import numpy as np
import pytest

from cotrain.codec import decode_pass_output
from cotrain.proto import wire_pb2
from cotrain_store.messages import LoraSpec, OpKind, QueuedOp, Result, ResultKind, RunId, encode
from cotrain_workers.ops import (
    Create,
    CreateOutput,
    Failure,
    OptimStep,
    Pass,
    PassOutput,
    StepOutput,
)
from cotrain_workers.requests import CYCLE_METRIC, engine_op, result_of
from cotrain_workers.spec import AdapterSpec
from tests.support.bodies import optim_body, pass_body


def op(kind: OpKind, seq: int = 1) -> QueuedOp:
    return QueuedOp(RunId("r"), seq, kind, 0, "inline", 0, 0.0)


def test_a_create_carries_every_choice_of_its_tenant() -> None:
    lora = LoraSpec(rank=3, seed=9, train_attn=False, train_mlp=True, train_unembed=False)
    made = engine_op(op(OpKind.CREATE, 0), encode(lora).encode())
    spec = AdapterSpec(rank=3, seed=9, train_attn=False, train_mlp=True, train_unembed=False)
    assert made == Create("r", 0, spec)
    assert spec.alpha == 32.0


@pytest.mark.parametrize(
    ("kind", "needs_grad"), [(OpKind.FORWARD, False), (OpKind.FORWARD_BACKWARD, True)]
)
def test_a_pass_carries_its_datums_and_whether_it_needs_a_gradient(
    kind: OpKind, needs_grad: bool
) -> None:
    made = engine_op(op(kind), pass_body("r", 1, [[1, 2, 3], [4, 5]], loss_fn="ppo"))
    assert isinstance(made, Pass)
    assert (made.run, made.seq, made.loss_fn, made.needs_grad) == ("r", 1, "ppo", needs_grad)
    assert [datum.tokens.tolist() for datum in made.datums] == [[1, 2], [4]]
    assert [d.inputs["target_tokens"].tolist() for d in made.datums] == [[2, 3], [5]]
    assert [d.inputs["weights"].tolist() for d in made.datums] == [[1.0, 1.0], [1.0]]


def test_settings_of_a_loss_are_numbers_for_the_engine() -> None:
    request = wire_pb2.ForwardBackwardRequest(loss_fn_config={"clip": 0.2})
    request.loss_fn_config_v2["note"].text = "words"
    made = engine_op(op(OpKind.FORWARD), request.SerializeToString())
    assert isinstance(made, Pass)
    assert made.loss_config == {"clip": 0.2}


def test_an_optim_step_carries_its_numbers() -> None:
    made = engine_op(op(OpKind.OPTIM_STEP), optim_body(lr=0.5))
    assert made == OptimStep("r", 1, 0.5, 0.9, 0.95, 1e-8, 0.0, 0.0)


def test_a_rejected_op_fails_with_what_was_said_at_the_door() -> None:
    body = Result.failed("rank must be…", "user").payload
    assert engine_op(op(OpKind.REJECTED), body) == Failure("rank must be…", "user")


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.FORWARD_BACKWARD])
def test_a_body_that_cannot_be_read_fails_instead_of_raising(kind: OpKind) -> None:
    made = engine_op(op(kind), b"\xff\xff")
    assert isinstance(made, Failure)
    assert made.category == "user"


def test_a_passs_result_has_its_logprobs_in_order_and_its_cycle() -> None:
    logprobs = [np.array([-1.5, -2.5], np.float32), np.zeros((3, 2), np.float32)]
    result = result_of(op(OpKind.FORWARD_BACKWARD), PassOutput(logprobs, loss_sum=4.0), cycle=7)
    assert result.kind is ResultKind.PASS
    output = decode_pass_output(result.payload)
    assert output.metrics == {"loss:sum": 4.0, CYCLE_METRIC: 7.0}
    assert [o["logprobs"].data for o in output.loss_fn_outputs] == [[-1.5, -2.5], [0.0] * 6]


def test_the_other_results_say_what_the_wire_says() -> None:
    step = result_of(op(OpKind.OPTIM_STEP), StepOutput(grad_norm=0.25), cycle=7)
    assert json.loads(step.payload) == {"metrics": {"grad_norm": 0.25, CYCLE_METRIC: 7.0}}
    create = result_of(op(OpKind.CREATE), CreateOutput(trainable_parameters=10), cycle=7)
    assert create.json() == {"model_id": "r", "type": "create_model"}
    failure = result_of(op(OpKind.FORWARD), Failure("No.", "server"), cycle=7)
    assert (failure.kind, failure.json()["category"]) == (ResultKind.FAILURE, "server")
