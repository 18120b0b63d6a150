"""Connection of a client: capabilities of the server, sharing, cancellation and closing."""

from __future__ import annotations

import asyncio
import atexit
import gc
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from cotrain import Datum, ModelInput, ServiceClient
from cotrain.errors import ClientClosed, MalformedMessage, NotFoundError, UnsupportedInput, VersionMismatch
from cotrain.protocol import PROTOCOL, __version__
from cotrain.requests.connection import BackgroundLoop, cancel_the_rest_and, shared_connection
from cotrain.settings import ClientSettings
from cotrain.wire.proto import wire_pb2 as wire
from tests.support.fake_api import FakeApi

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
    ((close, pid, connection),) = at_exit
    close(pid + 1, connection)
    assert shared.loop.run(asyncio.sleep(0, "open")) == "open"
    close(pid, connection)
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
        await cancel_the_rest_and(nothing)
        assert asking.cancelled()
        assert begun.is_set()

    asyncio.run(close())
    gc.collect()
