"""Connection of a client: capabilities of the server, sharing, cancellation, closing, and polls for results."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest

from cotrain import Datum, ModelInput, ServiceClient
from cotrain.errors import (
    APIConnectionError,
    CheckpointNotFound,
    ClientClosed,
    MalformedMessage,
    NotFoundError,
    RequestFailed,
    UnsupportedInput,
    VersionMismatch,
)
from cotrain.requests.background_loop import BackgroundLoop, cancel_all_and_run
from cotrain.requests.connection import shared_connection
from cotrain.requests.polling import NOT_FOUND, wait_for_pass, wait_for_result
from cotrain.settings import ClientSettings
from cotrain.transport import responses as patience
from cotrain.transport.http import Transport
from cotrain.transport.responses import RetryPolicy
from cotrain.version import PROTOCOL, __version__
from cotrain.wire.proto import wire_pb2 as wire
from cotrain.wire.runs import OptimStepResponse
from cotrain_store.errors import Reason
from tests.support.fake_api import Answer, FakeApi, pending, protobuf, refusal

URL = "http://server:8000"


@pytest.fixture
def service(api: FakeApi) -> Iterator[ServiceClient]:
    with ServiceClient(URL, "tml-key", network=api.network) as client:
        yield client


def configure(api: FakeApi, **config: Any) -> None:
    api.answers["client/config"] = [httpx.Response(200, json=config)]


def train(service: ServiceClient, datums: int) -> None:
    datum = Datum(model_input=ModelInput.from_ints([1, 2, 3] * 1_000), loss_fn_inputs={})
    service.create_lora_training_client("m").forward([datum] * datums, "cross_entropy").result()


def passes(api: FakeApi) -> list[httpx.Request]:
    return [call for call in api.calls if call.url.path.endswith("/forward_backward")]


def test_the_capabilities_are_requested_once_before_anything_else(api: FakeApi, service: ServiceClient) -> None:
    train(service, 1)
    train(service, 1)
    assert api.paths()[:3] == ["client/config", "create_session", "create_model"]
    assert api.paths().count("client/config") == 1
    assert api.bodies("client/config") == [{"sdk_version": f"cotrain-{__version__}"}]


@pytest.mark.parametrize(
    ("config", "chunks"),
    [
        ({}, [5]),
        ({"fwdbwd_max_chunk_len": 2}, [2, 2, 1]),
        ({"fwdbwd_max_chunk_bytes_count": 30_000}, [2, 2, 1]),
        ({"fwdbwd_max_chunk_bytes_count": 30_000, "cotrain_max_pass_bytes": 70_000}, [5]),
    ],
)
def test_the_server_states_the_maximum_size_of_a_request(
    api: FakeApi, service: ServiceClient, config: dict[str, int], chunks: list[int]
) -> None:
    configure(api, **config)
    train(service, 5)
    messages = [wire.ForwardBackwardRequest.FromString(call.content) for call in passes(api)]
    assert [len(message.data) for message in messages] == chunks
    assert [message.seq_id for message in messages] == list(range(1, len(chunks) + 1))


def test_a_pass_too_large_for_one_request_takes_no_number(api: FakeApi, service: ServiceClient) -> None:
    configure(api, cotrain_max_pass_bytes=30_000)
    run = service.create_lora_training_client("m")
    datum = Datum(model_input=ModelInput.from_ints([1] * 3_000), loss_fn_inputs={})
    with pytest.raises(UnsupportedInput, match="Send it in several calls"):
        run.forward_backward([datum] * 5, "cross_entropy")
    run.forward([datum], "cross_entropy").result()
    assert list(api.passes) == ["pass:1"]


@pytest.mark.parametrize("is_distant", [True, False])
def test_passes_are_compressed_if_the_server_requests_it(
    api: FakeApi, service: ServiceClient, is_distant: bool
) -> None:
    configure(api, proto_compress_fwdbwd=is_distant)
    service.create_lora_training_client("m")
    assert service._connection.transport.compresses == is_distant


def test_a_shared_connection_is_closed_only_by_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    settings = ClientSettings("http://127.0.0.1:9", "tml-at-exit")
    shared = shared_connection(settings)
    assert shared_connection(settings) is shared
    ((close, farewell),) = at_exit
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        close(farewell)
    assert shared.loop.run(asyncio.sleep(0, "open")) == "open"
    close(farewell)
    with pytest.raises(ClientClosed):
        shared.loop.run(asyncio.sleep(0))


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_server_of_another_protocol_is_refused(api: FakeApi, service: ServiceClient, protocol: int) -> None:
    configure(api, cotrain_version="9.8.7", cotrain_protocol=protocol)
    with pytest.raises(VersionMismatch, match=r"install cotrain 9\.8\.7 here") as caught:
        service.create_lora_training_client("m")
    assert f"the server is cotrain 9.8.7 and speaks protocol {protocol}" in str(caught.value)
    assert api.paths() == ["client/config"]


def test_a_server_without_a_protocol_number_is_accepted(api: FakeApi, service: ServiceClient) -> None:
    configure(api, pjwt_auth_enabled=False)
    train(service, 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx.Response(404, json={"detail": "Not Found"}), NotFoundError),
        (httpx.Response(404, html="<html>"), NotFoundError),
        (httpx.Response(200, html="<html>"), MalformedMessage),
    ],
)
def test_a_server_of_another_kind_is_detected(
    api: FakeApi, service: ServiceClient, answer: httpx.Response, error: type[Exception]
) -> None:
    api.answers["client/config"] = [answer]
    with pytest.raises(error, match=f"{URL} is no cotrain server.*is the base URL right"):
        service.create_lora_training_client("m")


FOREVER = 3600


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop("test")
    yield background
    background.close(nothing)


async def nothing() -> None: ...


def test_a_call_from_the_thread_of_the_client_is_refused(loop: BackgroundLoop) -> None:
    async def call_back() -> None:
        loop.run(nothing())

    with pytest.raises(RuntimeError, match="would wait for itself"):
        loop.run(call_back())


def test_cancelling_a_wait_cancels_the_work(loop: BackgroundLoop) -> None:
    started, ended = threading.Event(), threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(FOREVER)
        finally:
            ended.set()

    async def give_up() -> None:
        waiting = asyncio.create_task(loop.run_async(work()))
        assert await asyncio.to_thread(started.wait, 120)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(give_up())
    assert ended.wait(120)


def test_closing_raises_in_waiting_calls(loop: BackgroundLoop) -> None:
    started = threading.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(FOREVER)

    async def wait() -> None:
        with pytest.raises(ClientClosed):
            await loop.run_async(work())

    def close() -> None:
        started.wait(120)
        loop.close(nothing)

    closer = threading.Thread(target=close)
    closer.start()
    asyncio.run(wait())
    closer.join()
    with pytest.raises(ClientClosed):
        loop.run(nothing())


def test_closing_cancels_no_task_before_its_start() -> None:
    begun = asyncio.Event()

    async def connect() -> None:
        begun.set()
        await asyncio.sleep(FOREVER)

    async def ask() -> None:
        async with anyio.create_task_group() as connecting:  # as httpx connects
            connecting.start_soon(connect)
            await asyncio.sleep(FOREVER)

    async def close() -> None:
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        assert not begun.is_set()
        await cancel_all_and_run(nothing)
        assert asking.cancelled()
        assert begun.is_set()

    asyncio.run(close())
    gc.collect()


async def wait_for_step(transport: Transport, request_id: str) -> OptimStepResponse:
    return await wait_for_result(transport, request_id, OptimStepResponse)


def poll(
    waiting: Callable[[Transport, str], Awaitable[Any]], *answers: Answer, policy: RetryPolicy | None = None
) -> tuple[Any, FakeApi]:
    """Wait for a result of request `r`. A pause lasts one turn of the loop."""
    api = FakeApi(answers={"retrieve_future": list(answers)})

    async def run() -> Any:
        transport = Transport(
            "http://server", "k", network=api.network, policy=policy, sleep=lambda _: asyncio.sleep(0)
        )
        try:
            return await waiting(transport, "r")
        finally:
            await transport.close()

    return asyncio.run(run()), api


DONE = httpx.Response(200, json={"metrics": {"grad_norm": 2.0}})


def test_a_pending_result_is_polled_again() -> None:
    result, api = poll(wait_for_step, pending("r"), pending("r"), DONE)
    assert result.metrics == {"grad_norm": 2.0}
    assert api.paths() == ["retrieve_future"] * 3


@pytest.mark.parametrize("trouble", [refusal(500), refusal(429), httpx.ConnectError("refused")])
def test_a_result_is_received_after_a_restart_of_the_server(trouble: Answer) -> None:
    result, _ = poll(wait_for_step, trouble, pending("r"), trouble, DONE)
    assert result.metrics == {"grad_norm": 2.0}


def test_a_failed_request_has_a_reason_and_a_category() -> None:
    failure = httpx.Response(200, json={"error": "no such loss", "category": "user"})
    with pytest.raises(RequestFailed, match="no such loss") as caught:
        poll(wait_for_pass, failure)
    assert (caught.value.request_id, caught.value.category) == ("r", "user")


def test_a_load_of_a_missing_checkpoint_fails_as_not_found() -> None:
    assert Reason.CHECKPOINT_NOT_FOUND.message == NOT_FOUND
    failure = httpx.Response(200, json={"error": NOT_FOUND, "category": "user"})
    with pytest.raises(CheckpointNotFound, match="404: Checkpoint not found") as caught:
        poll(wait_for_step, failure)
    assert isinstance(caught.value, NotFoundError)
    assert isinstance(caught.value, RequestFailed)
    assert (caught.value.request_id, caught.value.category) == ("r", "user")
    assert (caught.value.status_code, caught.value.message) == (404, NOT_FOUND)


def test_a_failure_of_an_unknown_category_is_still_a_failure() -> None:
    failure = httpx.Response(200, json={"error": "odd", "category": "weather"})
    with pytest.raises(RequestFailed, match="odd") as caught:
        poll(wait_for_step, failure)
    assert caught.value.category == "unknown"


def test_a_pass_result_may_be_protobuf_or_json() -> None:
    binary = protobuf(wire.ForwardBackwardOutput(loss_fn_output_type="A", metrics={"loss:sum": 1}))
    text = {"loss_fn_output_type": "A", "loss_fn_outputs": [], "metrics": {"loss:sum": 1}}
    from_binary, _ = poll(wait_for_pass, binary)
    from_text, _ = poll(wait_for_pass, httpx.Response(200, json=text))
    assert from_binary == from_text


def test_an_unknown_request_is_polled_only_for_a_limited_time() -> None:
    with pytest.raises(NotFoundError):
        poll(wait_for_step, refusal(404))


def test_a_server_that_stays_unreachable_is_an_error() -> None:
    with pytest.raises(APIConnectionError):
        poll(wait_for_step, httpx.ConnectError("gone"), policy=RetryPolicy(give_up_after_s=-1.0))


@pytest.mark.parametrize("content", [b"<html>", b"[1]"])
def test_an_answer_that_is_not_a_result_is_an_error(content: bytes) -> None:
    with pytest.raises(MalformedMessage):
        poll(wait_for_step, httpx.Response(200, content=content))


def test_the_reason_of_a_pending_result_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Test the path from the wire to the logger. Its timing is tested in `transport/test_responses.py`."""
    monkeypatch.setattr(patience, "WARN_AFTER_S", 0.0)
    reason = {"queue_state_reason": "the server's store is restarting"}
    pending_answer = httpx.Response(408, json={"request_id": "r", "queue_state": "paused_capacity", **reason})
    poll(wait_for_step, pending("r"), pending_answer, pending_answer, DONE)
    (message,) = caplog.messages
    assert message == "still waiting, and trying again: the server's store is restarting"
