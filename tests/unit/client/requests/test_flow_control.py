"""Flow control: order and limits of sending, chunks of passes, and training loops faster than their server."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from cotrain import ServiceClient, TrainingClient, UnsupportedInput
from cotrain.errors import APIError, ClientClosed, RateLimitError
from cotrain.requests import flow_control as flow
from cotrain.requests.chunks import chunks_of, combine, cut
from cotrain.requests.flow_control import (
    DISPATCH_REQUESTS,
    IN_FLIGHT_BYTES,
    IN_FLIGHT_REQUESTS,
    Dispatch,
    InFlightLimit,
    SendQueue,
)
from cotrain.types import ClientConfigResponse, ForwardBackwardOutput, TensorData
from cotrain.wire.proto import wire_pb2 as wire
from tests.support.fake_api import FakeApi, refusal
from tests.support.waiting import until

PATIENCE_S = 120


class Server:
    """Server that answers a posted request when a test calls `take` or `refuse`, and records arrivals."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.taken: list[int] = []
        self._taking: dict[int, asyncio.Future[None]] = {}

    def post(self, seq_id: int) -> Callable[[], Coroutine[None, None, int]]:
        async def posted() -> int:
            self.came.append(seq_id)
            self._taking[seq_id] = asyncio.get_running_loop().create_future()
            await self._taking[seq_id]
            self.taken.append(seq_id)
            return seq_id

        return posted

    async def take(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self._taking.pop(seq_id).set_result(None)
        await settled()

    async def refuse(self, *seq_ids: int, error: type[APIError] = RateLimitError) -> None:
        for seq_id in seq_ids:
            refusal = RateLimitError("full", 429, None) if error is RateLimitError else error("no")
            self._taking.pop(seq_id).set_exception(refusal)
        await settled()


class Pauses:
    """Pauses that end when a test calls `end`."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        self._ends: list[asyncio.Event] = []

    async def __call__(self, failures: int, _: RateLimitError, __: float) -> None:
        self.failures.append(failures)
        self._ends.append(asyncio.Event())
        await self._ends[-1].wait()

    async def end(self, count: int | None = None) -> None:
        ending, self._ends = self._ends[:count], self._ends[count or len(self._ends) :]
        for end in ending:
            end.set()
        await settled()


async def settled() -> None:
    """Run the event loop until every task is blocked."""
    for _ in range(50):
        await asyncio.sleep(0)


def start(queue: SendQueue, server: Server, *seq_ids: int, size_bytes: int = 1) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(queue.send(seq_id, size_bytes, server.post(seq_id))) for seq_id in seq_ids]


@pytest.fixture
def dispatch() -> Dispatch:
    return Dispatch()


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def queue(dispatch: Dispatch, pauses: Pauses) -> SendQueue:
    return SendQueue(dispatch, pauses)


async def test_requests_are_sent_in_order_up_to_the_concurrency_limit(queue: SendQueue, server: Server) -> None:
    count = DISPATCH_REQUESTS + 10
    sends = start(queue, server, *range(1, count + 1))
    await settled()
    assert server.came == list(range(1, DISPATCH_REQUESTS + 1))
    await server.take(3)
    assert server.came[-1] == DISPATCH_REQUESTS + 1
    while len(server.taken) < count:
        await server.take(*set(server.came) - set(server.taken))
    assert [await send for send in sends] == list(range(1, count + 1))


async def test_bytes_in_flight_are_limited_and_a_large_request_goes_alone(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 10
    sends = start(queue, server, 1, 2, 3, size_bytes=5) + start(queue, server, 4, size_bytes=99)
    await settled()
    assert server.came == [1, 2]
    await server.take(1, 2)
    assert server.came == [1, 2, 3]
    await server.take(3)
    assert server.came == [1, 2, 3, 4]
    await server.take(4)
    await asyncio.gather(*sends)


async def test_the_first_request_of_a_run_is_sent_at_any_load_of_other_runs(
    dispatch: Dispatch, queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    dispatch.limit_bytes = 10
    greedy = start(queue, server, 1, 2, 3, size_bytes=5)
    modest = start(SendQueue(dispatch, pauses), server, 101, 102, size_bytes=5)
    await settled()
    assert server.came == [1, 2, 101]
    await server.take(101)
    assert server.came == [1, 2, 101, 102]
    await server.take(1, 2, 102)
    await server.take(3)
    await asyncio.gather(*greedy, *modest)


async def test_a_request_with_an_earlier_number_goes_before_waiting_ones(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 10
    later = start(queue, server, 3, 4, 5, size_bytes=5)
    await settled()
    early = start(queue, server, 2, size_bytes=5)
    await settled()
    assert server.came == [3, 4, 2]
    await server.take(2, 3, 4)
    await server.take(5)
    await asyncio.gather(*early, *later)


async def test_no_request_overtakes_one_rejected_by_a_full_server(
    queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    sends = start(queue, server, 1, 2, 3)
    await settled()
    await server.refuse(2, 3)
    sends += start(queue, server, 4)
    await server.take(1)
    assert server.came == [1, 2, 3]
    await pauses.end()
    assert server.came == [1, 2, 3, 2]
    await server.take(2)
    assert server.came == [1, 2, 3, 2, 3]
    await server.take(3)
    await server.take(4)
    assert [await send for send in sends] == [1, 2, 3, 4]
    assert server.taken == [1, 2, 3, 4]


async def test_a_later_pause_that_ends_first_does_not_reorder_requests(
    queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    sends = start(queue, server, 1, 2)
    await settled()
    await server.refuse(2)
    await server.refuse(1)
    await pauses.end(1)
    assert server.came == [1, 2]
    await pauses.end()
    await server.take(1)
    await server.take(2)
    await asyncio.gather(*sends)
    assert server.taken == [1, 2]


async def test_a_full_server_is_retried_without_limit_at_a_bounded_interval(
    queue: SendQueue, pauses: Pauses, server: Server
) -> None:
    (send,) = start(queue, server, 1)
    await settled()
    for _ in range(60):
        await server.refuse(1)
        await pauses.end()
    await server.take(1)
    assert await send == 1
    assert Counter(pauses.failures) == {1: 1, 2: 1, 3: 58}


async def test_a_request_that_fails_delays_no_other(queue: SendQueue, server: Server) -> None:
    first, second = start(queue, server, 1, 2)
    await settled()
    await server.refuse(1, error=APIError)
    await server.take(2)
    with pytest.raises(APIError):
        await first
    assert await second == 2


async def test_a_request_cancelled_while_sending_releases_its_share(
    dispatch: Dispatch, queue: SendQueue, server: Server
) -> None:
    dispatch.limit_bytes = 1
    first, second = start(queue, server, 1, 2)
    await settled()
    first.cancel()
    await settled()
    assert server.came == [1, 2]
    await server.take(2)
    assert await second == 2
    assert dispatch.fits(1)


@pytest.mark.parametrize(("size_bytes", "requests"), [(IN_FLIGHT_BYTES, 1), (1, IN_FLIGHT_REQUESTS)])
def test_a_call_beyond_the_limit_blocks_until_enough_is_released(size_bytes: int, requests: int) -> None:
    limit, is_in = InFlightLimit(), threading.Event()
    limit.acquire(size_bytes, requests)

    def enter() -> None:
        limit.acquire(2)
        is_in.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert not is_in.wait(0.05)
    limit.release(size_bytes, requests)
    assert is_in.wait(PATIENCE_S)
    thread.join()


def test_one_call_is_always_under_the_limit() -> None:
    limit = InFlightLimit()
    limit.acquire(10 * IN_FLIGHT_BYTES, 10 * IN_FLIGHT_REQUESTS)
    limit.release(10 * IN_FLIGHT_BYTES, 10 * IN_FLIGHT_REQUESTS)
    limit.acquire(IN_FLIGHT_BYTES, IN_FLIGHT_REQUESTS)


def test_the_loop_that_releases_never_waits() -> None:
    limit = InFlightLimit(must_not_wait=lambda: True)
    for _ in range(3):
        limit.acquire(IN_FLIGHT_BYTES)


def output(datums: int, **metrics: float) -> ForwardBackwardOutput:
    named = {name.replace("__", ":"): value for name, value in metrics.items()}
    tensors = [{"logprobs": TensorData(data=[float(i)], dtype="float32")} for i in range(datums)]
    return ForwardBackwardOutput(loss_fn_output_type="A", loss_fn_outputs=tensors, metrics=named)


def datum_of(size: int) -> wire.Datum:
    return wire.Datum(model_input=[wire.Chunk(encoded_text=wire.EncodedTextChunk(tokens=b"x" * size))])


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 5), st.integers(1, 100))
def test_chunks_keep_every_datum_in_order_within_both_limits(sizes: list[int], max_datums: int, max_bytes: int) -> None:
    datums = [datum_of(size) for size in sizes]
    chunks = cut(datums, max_datums, max_bytes)
    assert [datum for chunk in chunks for datum in chunk] == datums
    for chunk in chunks:
        assert len(chunk) <= max_datums
        assert len(chunk) == 1 or sum(datum.ByteSize() for datum in chunk) <= max_bytes
    assert all(chunks) or chunks == [[]]


def test_a_pass_without_datums_is_still_one_request() -> None:
    assert cut([], 1, 1) == [[]]


@given(st.lists(st.integers(0, 3000), max_size=20), st.integers(5_000, 40_000))
def test_a_pass_is_sent_whole_or_not_at_all_to_our_server(sizes: list[int], most: int) -> None:
    datums = [datum_of(size) for size in sizes]
    config = ClientConfigResponse(cotrain_max_pass_bytes=most, fwdbwd_max_chunk_len=20)
    request = wire.ForwardBackwardRequest(model_id="m" * 100, seq_id=2**31 - 1, data=datums)
    if request.ByteSize() <= most - 5_000:
        assert chunks_of(datums, config) == [datums]
    elif request.ByteSize() > most:
        with pytest.raises(UnsupportedInput, match="Send it in several calls"):
            chunks_of(datums, config)


def test_our_server_states_its_maximum_number_of_datums() -> None:
    config = ClientConfigResponse(cotrain_max_pass_bytes=10**9, fwdbwd_max_chunk_len=2)
    assert chunks_of([datum_of(1)] * 2, config) == [[datum_of(1)] * 2]
    with pytest.raises(UnsupportedInput, match=r"data has 3 datums; one call takes up to 2 here"):
        chunks_of([datum_of(1)] * 3, config)


def test_one_chunk_is_the_whole_result() -> None:
    whole = output(2, loss__sum=1.0, odd=3.0)
    assert combine([whole]) is whole


def test_datums_are_joined_in_the_order_of_the_chunks() -> None:
    joined = combine([output(3), output(2)])
    assert [datum["logprobs"].data for datum in joined.loss_fn_outputs] == [[0], [1], [2], [0], [1]]


@pytest.mark.parametrize(
    ("name", "combined"), [("sum", 5.0), ("min", 1.0), ("max", 4.0), ("mean", 1.75), ("slack", 2.25)]
)
def test_a_metric_is_combined_according_to_its_name(name: str, combined: float) -> None:
    parts = [output(3, **{f"x__{name}": 1.0}), output(1, **{f"x__{name}": 4.0})]
    assert combine(parts).metrics == {f"x:{name}": combined}


def test_unique_metrics_keep_every_value_under_its_own_name() -> None:
    parts = [output(1, clock__unique=7), output(1, clock__unique=7), output(1, clock__unique=8)]
    assert combine(parts).metrics == {"clock:unique": 7, "clock:unique_1": 7, "clock:unique_2": 8}


def test_a_metric_missing_in_a_chunk_or_of_unknown_kind_is_left_out() -> None:
    parts = [output(1, a__sum=1, b__sum=1, c__other=1, d=1), output(1, a__sum=2, c__other=1, d=1)]
    assert combine(parts).metrics == {"a:sum": 3}


def test_a_mean_over_chunks_without_datums_is_the_plain_mean() -> None:
    assert combine([output(0, a__mean=1.0), output(0, a__mean=3.0)]).metrics == {"a:mean": 2.0}


LIMIT = 10
STEPS = 40


@dataclass
class SlowApi(FakeApi):
    """Server that accepts an optimizer step only when it is allowed to."""

    may_take: threading.Event = field(default_factory=threading.Event)

    @override
    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await super()._answer(request)
        if request.url.path.endswith("optim_step"):
            await until(self.may_take.is_set)
        return answer


class Loop:
    """Training loop that never waits for a result."""

    def __init__(self, run: TrainingClient) -> None:
        self.sent = 0
        self.is_at_the_limit = threading.Event()
        self._run = run

    def __call__(self) -> list[float]:
        futures = []
        for _ in range(STEPS):
            futures.append(self._run.optim_step())
            self.sent += 1
            if self.sent == LIMIT:
                self.is_at_the_limit.set()
        return [(future.result(PATIENCE_S).metrics or {})["grad_norm"] for future in futures]


@pytest.fixture
def api() -> SlowApi:
    return SlowApi()


@pytest.fixture
def service(api: SlowApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceClient]:
    monkeypatch.setattr(flow, "IN_FLIGHT_REQUESTS", LIMIT)
    with ServiceClient("http://server", "tml-key", network=api.network) as service:
        yield service


def test_a_loop_faster_than_its_server_blocks_until_requests_are_accepted(api: SlowApi, service: ServiceClient) -> None:
    loop = Loop(service.create_lora_training_client("m"))
    with ThreadPoolExecutor(1) as pool:
        losses = pool.submit(loop)
        loop.is_at_the_limit.wait(PATIENCE_S)
        assert api.paths().count("optim_step") <= LIMIT
        service.get_server_capabilities()  # which do not delay others
        assert loop.sent == LIMIT
        api.may_take.set()
        assert losses.result(PATIENCE_S) == [1.0] * STEPS
    assert [body["seq_id"] for body in api.bodies("optim_step")] == list(range(1, STEPS + 1))


def test_closing_the_client_raises_in_a_call_that_blocks(api: SlowApi, service: ServiceClient) -> None:
    loop = Loop(service.create_lora_training_client("m"))
    with ThreadPoolExecutor(1) as pool:
        losses = pool.submit(loop)
        loop.is_at_the_limit.wait(PATIENCE_S)
        service.close()
        with pytest.raises(ClientClosed):
            losses.result(PATIENCE_S)


def test_a_full_server_gets_the_requests_of_a_run_in_order(api: SlowApi, service: ServiceClient) -> None:
    api.may_take.set()
    api.answers["optim_step"] = [refusal(429, "full", **{"Retry-After": "0.001"})] * 25
    loop = Loop(service.create_lora_training_client("m"))
    assert loop() == [1.0] * STEPS
    taken = [body["seq_id"] for body in api.bodies("optim_step")][25:]
    assert taken == list(range(1, STEPS + 1))
