from __future__ import annotations

import asyncio
import threading

import pytest

from cotrain import (
    AdamParams,
    BadRequestError,
    ClientClosed,
    Datum,
    ModelInput,
    ServiceClient,
    TrainingClient,
    UnsupportedInput,
    types,
)
from tests.support.fake_api import FakeApi, refusal

DATUM = Datum(model_input=ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6]})


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
