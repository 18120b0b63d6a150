from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from cotrain import Datum, ModelInput, TrainingClient
from cotrain.requests.run_requests import POLLS_AT_ONCE
from cotrain.types import ForwardBackwardOutput
from cotrain.wire.proto import wire_pb2 as wire
from tests.support.fake_api import FakeApi
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
