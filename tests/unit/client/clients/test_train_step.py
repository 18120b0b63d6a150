from __future__ import annotations

import asyncio
import threading

import pytest

from cotrain import AdamParams, BadRequestError, Datum, ModelInput, TrainingClient, TrainOutput
from tests.support.fake_api import FakeApi, refusal

DATUM = Datum(model_input=ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6], "weights": [0.25]})
UNWEIGHTED = Datum(model_input=ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6]})


def test_a_step_is_a_pass_followed_by_an_optimizer_step(api: FakeApi, run: TrainingClient) -> None:
    output = run.train([DATUM], "cross_entropy", learning_rate=0.5).result()
    assert isinstance(output, TrainOutput)
    assert output.loss == 4.0  # of one datum, whose loss is 1 here, per weight
    assert output.metrics == {"loss:sum": 1.0, "clock_cycle:unique": 1.0, "grad_norm": 1.0}
    assert [list(outputs) for outputs in output.loss_fn_outputs] == [["logprobs"]]
    (sent,) = api.bodies("optim_step")
    assert (sent["seq_id"], sent["adam_params"]["learning_rate"]) == (2, 0.5)


def test_both_requests_are_sent_before_either_is_awaited(api: FakeApi, run: TrainingClient) -> None:
    gate = api.hold["pass:1"] = threading.Event()

    async def train() -> TrainOutput:
        future = await run.train_async([DATUM])
        assert len(api.bodies("optim_step")) == 1
        assert not future.done()
        gate.set()
        return await future

    assert asyncio.run(train()).loss == 4.0


def test_the_learning_rate_overrides_that_of_the_parameters(api: FakeApi, run: TrainingClient) -> None:
    params = AdamParams(learning_rate=0.1, beta1=0.5)
    for rate in (None, 0.2):
        run.train([DATUM], "cross_entropy", rate, adam_params=params).result()
    sent = [body["adam_params"] for body in api.bodies("optim_step")]
    assert [(s["learning_rate"], s["beta1"]) for s in sent] == [(0.1, 0.5), (0.2, 0.5)]


@pytest.mark.parametrize("endpoint", ["forward_backward", "optim_step"])
def test_the_future_fails_with_either_request(api: FakeApi, run: TrainingClient, endpoint: str) -> None:
    api.answers[endpoint] = [refusal(400, "too odd")]
    with pytest.raises(BadRequestError, match="too odd"):
        run.train([DATUM]).result()
    assert run.train([DATUM]).result().loss == 4.0


def test_an_invalid_learning_rate_takes_no_number(api: FakeApi, run: TrainingClient) -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        run.train([DATUM], learning_rate=-1.0)
    run.optim_step().result()
    assert [body["seq_id"] for body in api.bodies("optim_step")] == [1]


@pytest.mark.parametrize(
    ("data", "loss_fn", "loss"),
    [
        ([DATUM], "cross_entropy", 4.0),
        ([DATUM, DATUM, DATUM], "cross_entropy", 4.0),
        ([DATUM, UNWEIGHTED], "cross_entropy", 2.0),
        ([DATUM], "importance_sampling", 1.0),
    ],
)
def test_a_loss_is_per_weight_if_every_datum_has_weights_it_uses(
    run: TrainingClient, data: list[Datum], loss_fn: str, loss: float
) -> None:
    for passed in (run.forward(data, loss_fn), run.forward_backward(data, loss_fn)):
        output = passed.result()
        assert output.loss == loss
        assert output.metrics["loss:sum"] == len(data)
