"""Requests of one run: many at once, and their order while the server is unreachable."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import httpx
import pytest

from cotrain import Datum, ModelInput, ServiceClient, TrainingClient
from cotrain.errors import APIConnectionError, APIError
from cotrain.requests.run_requests import POLLS_AT_ONCE
from cotrain.transport.responses import RetryPolicy
from cotrain.types import ForwardBackwardOutput
from cotrain.wire.proto import wire_pb2 as wire
from tests.support.fake_api import FakeApi, refusal
from tests.support.waiting import until

MANY = 300
FEWER = 250
THREADS = 8
OF_EACH = 40
WITHIN_S = 120.0
"""Time limit in seconds for a deadlock, not for speed."""
BYTES_PER_FUTURE = 20_000
"""Bytes of two tasks, their frames and their futures, doubled as a margin."""


def datum(tokens: list[int]) -> Datum:
    return Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": tokens})


def order_of(output: ForwardBackwardOutput) -> float:
    return output.metrics["clock_cycle:unique"]


def test_few_of_many_futures_hold_a_connection(api: FakeApi, run: TrainingClient) -> None:
    gate = threading.Event()
    api.hold = {f"pass:{n + 1}": gate for n in range(MANY)}
    futures = [run.forward_backward([datum([5])], "cross_entropy") for _ in range(MANY)]

    def asked() -> set[str]:
        return {each["request_id"] for each in api.bodies("retrieve_future")} - {"create"}

    asyncio.run(until(lambda: len(api.passes) == MANY and len(asked()) >= POLLS_AT_ONCE))
    assert len(asked()) == POLLS_AT_ONCE
    gate.set()
    assert [order_of(future.result(WITHIN_S)) for future in futures] == list(range(1, MANY + 1))


def test_an_accepted_request_keeps_nothing_of_its_body(api: FakeApi, run: TrainingClient) -> None:
    gate, data = threading.Event(), [datum(list(range(2_000)))]
    api.hold = {f"pass:{n + 1}": gate for n in range(FEWER)}
    of_others = messages()
    tracemalloc.start()
    try:
        futures = [run.forward_backward(data, "cross_entropy") for _ in range(FEWER)]
        asyncio.run(until(lambda: len(api.passes) == FEWER))
        api.passes.clear()
        api.calls.clear()
        asyncio.run(until(lambda: len(messages()) <= len(of_others)))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes / len(futures) < BYTES_PER_FUTURE


def messages() -> list[object]:
    """Return the requests that are still referenced. Their bytes are not counted by Python."""
    gc.collect()  # garbage of an earlier test is unreferenced, and listed until a full collection
    return [each for each in gc.get_objects() if type(each) is wire.ForwardBackwardRequest]


def test_threads_and_a_loop_that_share_a_run_each_keep_their_order(run: TrainingClient) -> None:
    data = [datum([5])]

    def in_a_thread(_: int) -> list[float]:
        futures = [run.forward_backward(data, "cross_entropy") for _ in range(OF_EACH)]
        return [order_of(future.result(WITHIN_S)) for future in futures]

    async def in_a_loop() -> list[float]:
        sent = [run.forward_async(data, "cross_entropy") for _ in range(OF_EACH)]
        return [order_of(output) for output in await asyncio.gather(*(s.result_async() for s in sent))]

    with ThreadPoolExecutor(THREADS + 1) as pool:
        of_loop = pool.submit(asyncio.run, in_a_loop())
        orders = [*pool.map(in_a_thread, range(THREADS)), of_loop.result(WITHIN_S)]
    assert all(one == sorted(one) for one in orders)
    assert sorted(chain(*orders)) == list(range(1, (THREADS + 1) * OF_EACH + 1))


DATUM = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={})
NEVER_AGAIN = RetryPolicy(give_up_after_s=-1.0)


@pytest.fixture
def impatient(api: FakeApi) -> Iterator[TrainingClient]:
    with ServiceClient("http://server", "k", network=api.network, policy=NEVER_AGAIN) as service:
        yield service.create_lora_training_client("m")


def passes(api: FakeApi) -> list[tuple[int, int]]:
    """Return the number and the datum count of every pass that was sent."""
    sent = [call for call in api.calls if call.url.path.endswith("/forward_backward")]
    messages = [wire.ForwardBackwardRequest.FromString(call.content) for call in sent]
    return [(message.seq_id, len(message.data)) for message in messages]


@pytest.mark.parametrize("trouble", [httpx.ConnectError("gone"), refusal(503)])
def test_a_number_that_may_be_lost_is_filled_before_the_next_is_sent(
    api: FakeApi, impatient: TrainingClient, trouble: httpx.Response | Exception
) -> None:
    api.answers["optim_step"] = [trouble]
    with pytest.raises(APIError):
        impatient.optim_step().result()
    impatient.forward([DATUM], "cross_entropy").result()
    impatient.forward([DATUM], "cross_entropy").result()
    assert passes(api) == [(1, 0), (2, 1), (3, 1)]


def test_a_number_that_arrived_is_not_changed(api: FakeApi, impatient: TrainingClient) -> None:
    api.answers["optim_step"] = [httpx.ReadError("the answer is lost")]
    api.answers["forward_backward"] = [refusal(400, "seq 1 was already used")]
    with pytest.raises(APIError):
        impatient.optim_step().result()
    impatient.forward([DATUM], "cross_entropy").result()
    assert passes(api) == [(1, 0), (2, 1)]


def test_no_number_is_lost_while_the_server_is_unreachable(api: FakeApi, impatient: TrainingClient) -> None:
    api.answers["optim_step"] = [httpx.ConnectError("gone")]
    api.answers["forward_backward"] = [httpx.ConnectError("gone")] * 5
    for _ in range(2):
        with pytest.raises(APIConnectionError):
            impatient.optim_step().result()
    with pytest.raises(APIConnectionError):
        impatient.forward([DATUM], "cross_entropy").result()
    impatient.forward([DATUM], "cross_entropy").result()
    assert passes(api)[-4:] == [(1, 0), (2, 0), (3, 0), (4, 1)]
