"""Training: order of a run's requests, steps in one call, and saves for samplers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest
from pydantic import ValidationError

from cotrain import (
    AdamParams,
    BadRequestError,
    ClientClosed,
    Datum,
    ModelInput,
    SamplingParams,
    ServiceClient,
    TrainingClient,
    TrainOutput,
    UnsupportedInput,
    types,
)
from tests.support.fake_api import FakeApi, refusal
from tests.support.fake_sampling import FakeSampling
from tests.support.waiting import until

DATUM = Datum(model_input=ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6]})
WEIGHTED = Datum(model_input=ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6], "weights": [0.25]})
PATH = "tinker://s1:train:0/sampler_weights/"


@pytest.fixture
def api() -> FakeSampling:
    return FakeSampling()


def test_requests_are_numbered_in_the_order_of_the_calls(api: FakeApi, run: TrainingClient) -> None:
    futures = [run.forward_backward([DATUM], "cross_entropy"), run.forward([DATUM], "cross_entropy")]
    step = run.optim_step(AdamParams(learning_rate=0.5))
    assert [future.result().metrics["clock_cycle:unique"] for future in futures] == [1, 2]
    assert step.result().metrics == {"grad_norm": 1.0}
    assert [api.passes[f"pass:{seq}"].forward_only for seq in (1, 2)] == [False, True]
    sent = api.bodies("optim_step")[0]
    assert (sent["seq_id"], sent["adam_params"]["learning_rate"]) == (3, 0.5)


def test_a_large_pass_is_sent_in_chunks_and_returned_as_one(api: FakeApi, run: TrainingClient) -> None:
    output = run.forward_backward([DATUM] * 1030, "cross_entropy").result()
    assert sorted(len(message.data) for message in api.passes.values()) == [6, 1024]
    assert len(output.loss_fn_outputs) == 1030
    assert output.metrics == {"loss:sum": 1030, "clock_cycle:unique": 1, "clock_cycle:unique_1": 2}


def test_the_first_await_means_accepted_and_the_second_done(api: FakeApi, run: TrainingClient) -> None:
    api.hold["pass:1"] = threading.Event()

    async def train() -> float:
        future = await run.forward_backward_async([DATUM], "cross_entropy")
        assert "pass:1" in api.passes
        assert not future.done()
        api.hold["pass:1"].set()
        return (await future).metrics["loss:sum"]

    assert asyncio.run(train()) == 1


def test_a_request_does_not_wait_for_the_result_of_the_previous_one(api: FakeApi, run: TrainingClient) -> None:
    gate = api.hold["pass:1"] = threading.Event()
    first = run.forward_backward([DATUM], "cross_entropy")
    assert run.optim_step().result().metrics == {"grad_norm": 1.0}
    assert not first.done()
    gate.set()
    assert first.result().metrics["loss:sum"] == 1


def test_a_refused_request_leaves_no_gap_in_the_order(api: FakeApi, run: TrainingClient) -> None:
    api.answers["forward_backward"] = [refusal(400, "too odd")]
    with pytest.raises(BadRequestError, match="too odd"):
        run.forward_backward([DATUM], "cross_entropy").result()
    filler = api.passes["pass:1"]
    assert filler.forward_only
    assert not filler.data
    assert run.forward_backward([DATUM], "cross_entropy").result().metrics["clock_cycle:unique"] == 2


def test_the_first_await_raises_the_error_of_a_refused_request(api: FakeApi, run: TrainingClient) -> None:
    api.answers["optim_step"] = [refusal(400)]

    async def train() -> None:
        with pytest.raises(BadRequestError):
            await run.optim_step_async()

    asyncio.run(train())


def test_an_invalid_datum_takes_no_number(api: FakeApi, run: TrainingClient) -> None:
    audio = Datum(model_input=ModelInput(chunks=[types.DmelChunk()]))
    with pytest.raises(UnsupportedInput):
        run.forward_backward([audio], "cross_entropy")
    run.forward([DATUM], "cross_entropy").result()
    assert list(api.passes) == ["pass:1"]


def test_later_changes_of_the_arguments_have_no_effect(api: FakeApi, run: TrainingClient) -> None:
    data = [DATUM]
    future = run.forward_backward(data, "cross_entropy")
    data.clear()
    assert len(future.result().loss_fn_outputs) == 1


def test_threads_that_share_a_run_never_share_a_number(api: FakeApi, run: TrainingClient) -> None:
    def work() -> None:
        for _ in range(10):
            run.forward([DATUM], "cross_entropy").result()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(message.seq_id for message in api.passes.values()) == list(range(1, 41))


def test_closing_the_client_ends_every_wait(api: FakeApi) -> None:
    api.hold["pass:1"] = threading.Event()
    service = ServiceClient("http://server", "tml-key", network=api.network)
    run = service.create_lora_training_client("m")
    future = run.forward_backward([DATUM], "cross_entropy")
    service.close()
    with pytest.raises(ClientClosed):
        future.result()
    with pytest.raises(ClientClosed):
        run.optim_step()


def test_unloading_names_the_run(api: FakeApi, run: TrainingClient) -> None:
    run.unload()
    assert api.bodies("unload_model")[0]["model_id"] == run.model_id == "s1:train:0"


def test_info_is_available_for_threads_and_loops(run: TrainingClient) -> None:
    assert run.get_info() == asyncio.run(run.get_info_async())
    assert run.get_info().model_data.model_name == "m"


def test_a_step_is_a_pass_followed_by_an_optimizer_step(api: FakeApi, run: TrainingClient) -> None:
    output = run.train([WEIGHTED], "cross_entropy", learning_rate=0.5).result()
    assert isinstance(output, TrainOutput)
    assert output.loss == 4.0  # of one datum, whose loss is 1 here, per weight
    assert output.metrics == {"loss:sum": 1.0, "clock_cycle:unique": 1.0, "grad_norm": 1.0}
    assert [list(outputs) for outputs in output.loss_fn_outputs] == [["logprobs"]]
    (sent,) = api.bodies("optim_step")
    assert (sent["seq_id"], sent["adam_params"]["learning_rate"]) == (2, 0.5)


def test_both_requests_are_sent_before_either_is_awaited(api: FakeApi, run: TrainingClient) -> None:
    gate = api.hold["pass:1"] = threading.Event()

    async def train() -> TrainOutput:
        future = await run.train_async([WEIGHTED])
        assert len(api.bodies("optim_step")) == 1
        assert not future.done()
        gate.set()
        return await future

    assert asyncio.run(train()).loss == 4.0


def test_the_learning_rate_overrides_that_of_the_parameters(api: FakeApi, run: TrainingClient) -> None:
    params = AdamParams(learning_rate=0.1, beta1=0.5)
    for rate in (None, 0.2):
        run.train([WEIGHTED], "cross_entropy", rate, adam_params=params).result()
    sent = [body["adam_params"] for body in api.bodies("optim_step")]
    assert [(s["learning_rate"], s["beta1"]) for s in sent] == [(0.1, 0.5), (0.2, 0.5)]


@pytest.mark.parametrize("endpoint", ["forward_backward", "optim_step"])
def test_the_future_fails_with_either_request(api: FakeApi, run: TrainingClient, endpoint: str) -> None:
    api.answers[endpoint] = [refusal(400, "too odd")]
    with pytest.raises(BadRequestError, match="too odd"):
        run.train([WEIGHTED]).result()
    assert run.train([WEIGHTED]).result().loss == 4.0


def test_an_invalid_learning_rate_takes_no_number(api: FakeApi, run: TrainingClient) -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        run.train([WEIGHTED], learning_rate=-1.0)
    run.optim_step().result()
    assert [body["seq_id"] for body in api.bodies("optim_step")] == [1]


@pytest.mark.parametrize(
    ("data", "loss_fn", "loss"),
    [
        ([WEIGHTED], "cross_entropy", 4.0),
        ([WEIGHTED, WEIGHTED, WEIGHTED], "cross_entropy", 4.0),
        ([WEIGHTED, DATUM], "cross_entropy", 2.0),
        ([WEIGHTED], "importance_sampling", 1.0),
    ],
)
def test_a_loss_is_per_weight_if_every_datum_has_weights_it_uses(
    run: TrainingClient, data: list[Datum], loss_fn: str, loss: float
) -> None:
    for passed in (run.forward(data, loss_fn), run.forward_backward(data, loss_fn)):
        output = passed.result()
        assert output.loss == loss
        assert output.metrics["loss:sum"] == len(data)


def test_saves_are_numbered_in_the_order_of_the_calls(api: FakeSampling, run: TrainingClient) -> None:
    run.optim_step()
    saved = run.save_weights_for_sampler("a", ttl_seconds=3600, user_metadata={"step": "1"})
    run.optim_step().result()
    assert saved.result().path == PATH + "a"
    (sent,) = api.bodies("save_weights_for_sampler")
    assert sent == {
        "model_id": "s1:train:0",
        "seq_id": 2,
        "path": "a",
        "kind": "snapshot",
        "ttl_seconds": 3600,
        "user_metadata": {"step": "1"},
        "type": "save_weights_for_sampler",
    }


def test_an_ephemeral_sampler_needs_no_second_call(api: FakeSampling, run: TrainingClient) -> None:
    sampler = run.save_weights_and_get_sampling_client()
    assert sampler.get_base_model() == "m"
    assert sampler.sampler_id == "s1:sample:0"
    assert "create_sampling_session" not in api.paths()
    assert sampler.sample(ModelInput.from_ints([1]), 1, SamplingParams()).result().sequences


def test_a_named_sampler_is_made_from_the_saved_weights(api: FakeSampling, run: TrainingClient) -> None:
    asyncio.run(run.save_weights_and_get_sampling_client_async("best"))
    assert api.bodies("save_weights_for_sampler")[0]["path"] == "best"
    assert api.bodies("create_sampling_session")[0]["model_path"] == PATH + "best"


def test_a_sampler_has_the_weights_at_the_time_of_the_call(api: FakeSampling, run: TrainingClient) -> None:
    sampler = run.save_weights_and_get_sampling_client_async()
    run.optim_step().result()
    assert asyncio.run(sampler).sampler_id == "s1:sample:0"
    assert api.bodies("save_weights_for_sampler")[0]["seq_id"] == 1


def test_an_invalid_save_takes_no_number(api: FakeSampling, run: TrainingClient) -> None:
    with pytest.raises(ValidationError):
        run.save_weights_for_sampler("")
    run.optim_step().result()
    assert api.bodies("optim_step")[0]["seq_id"] == 1


def test_a_refused_save_leaves_no_gap_in_the_order(api: FakeSampling, run: TrainingClient) -> None:
    api.answers["save_weights_for_sampler"] = [refusal(400, "no")]
    with pytest.raises(BadRequestError):
        run.save_weights_for_sampler("a").result()
    assert list(api.passes) == ["pass:1"]


def test_a_cancelled_training_result_leaves_no_gap(api: FakeSampling, run: TrainingClient) -> None:
    api.answers["optim_step"] = [refusal(429, **{"Retry-After": "0.05"})]
    future = run.optim_step()
    asyncio.run(until(lambda: "optim_step" in api.paths()))  # and temporarily refused
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    run.optim_step().result()
    asyncio.run(until(lambda: len(api.bodies("optim_step")) == 3))
    assert sorted(body["seq_id"] for body in api.bodies("optim_step")) == [1, 1, 2]
    assert not api.cancelled
