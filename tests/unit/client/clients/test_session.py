"""Session of a client: creation, heartbeats and end, and the runs that it creates."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cotrain import NotFoundError, ServiceClient
from cotrain.clients.session import WARN_AFTER_MISSED, Session
from cotrain.requests.connection import Connection
from cotrain.settings import ClientSettings
from tests.support.fake_api import Answer, FakeApi, refusal


def send_heartbeats(api: FakeApi, times: int) -> list[float]:
    """Run a session for this many heartbeats. Return the waits between them."""
    waits: list[float] = []

    async def live() -> None:
        enough = asyncio.Event()

        async def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) > times:
                enough.set()
                await asyncio.Event().wait()

        connection.transport.sleep = wait
        session = Session(connection, None)
        await session.id()
        waiting = asyncio.create_task(enough.wait())
        assert session.heartbeat is not None
        await asyncio.wait([waiting, session.heartbeat], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await session.finish("success")

    connection = Connection(ClientSettings("http://server", "k"), network=api.network)
    connection.loop.run(live())
    connection.loop.close(connection.transport.close)
    return waits


def test_a_session_sends_a_heartbeat_every_ten_seconds() -> None:
    api = FakeApi()
    assert send_heartbeats(api, times=3) == [10.0] * 4
    assert api.bodies("session_heartbeat") == [{"session_id": "s1", "type": "session_heartbeat"}] * 3


@pytest.mark.parametrize("trouble", [refusal(503), httpx.ConnectError("gone")])
def test_a_missed_heartbeat_is_not_repeated_and_does_not_end_the_session(trouble: Answer) -> None:
    api = FakeApi(answers={"session_heartbeat": [trouble]})
    assert send_heartbeats(api, times=2) == [10.0] * 3


def test_two_minutes_without_an_answer_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeApi(answers={"session_heartbeat": [refusal(503)] * (WARN_AFTER_MISSED + 3)})
    send_heartbeats(api, times=WARN_AFTER_MISSED + 3)
    assert [record.levelname for record in caplog.records if record.name == "cotrain"] == ["WARNING"]


@pytest.mark.parametrize("status", [401, 404, 410])
def test_a_session_ended_by_the_server_sends_no_more_heartbeats(status: int) -> None:
    api = FakeApi(answers={"session_heartbeat": [refusal(status)]})
    assert send_heartbeats(api, times=5) == [10.0]


def test_a_client_closes_while_its_server_is_unreachable() -> None:
    api = FakeApi(answers={"sessions/s1/finish": [httpx.ConnectError("gone")]})
    send_heartbeats(api, times=0)
    assert api.paths()[-1] == "sessions/s1/finish"


def test_a_session_is_opened_once_and_only_when_needed(api: FakeApi, service: ServiceClient) -> None:
    service.get_server_capabilities()
    assert api.paths() == ["get_server_capabilities"]
    service.create_lora_training_client("m")
    service.create_lora_training_client("m")
    assert api.paths().count("create_session") == 1
    assert [body["model_seq_id"] for body in api.bodies("create_model")] == [0, 1]


def test_the_adapter_is_described_as_requested(api: FakeApi, service: ServiceClient) -> None:
    service.create_lora_training_client("m", 8, 3, train_unembed=False, user_metadata={"a": "b"})
    sent = api.bodies("create_model")[0]
    assert sent["lora_config"] == {
        "rank": 8,
        "seed": 3,
        "alpha": 32.0,
        "dropout": 0.0,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }
    assert sent["user_metadata"] == {"a": "b"}


def test_every_method_works_in_an_event_loop_too(service: ServiceClient) -> None:
    async def create() -> str:
        run = await service.create_lora_training_client_async("m", rank=4)
        capabilities = await service.get_server_capabilities_async()
        return f"{run.model_id} on {capabilities.supported_models[0].model_name}"

    assert asyncio.run(create()) == "s1:train:0 on m"


def test_a_refused_run_raises_with_the_reason(api: FakeApi, service: ServiceClient) -> None:
    api.answers["create_model"] = [refusal(404, "Base model 'x' is not served here.")]
    with pytest.raises(NotFoundError, match="not served here"):
        service.create_lora_training_client("x")


def test_leaving_the_context_finishes_the_session(api: FakeApi) -> None:
    with ServiceClient("http://server", "tml-key", network=api.network) as service:
        service.create_lora_training_client("m")
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "success"}}]


def test_the_client_is_an_asynchronous_context_too(api: FakeApi) -> None:
    async def work() -> None:
        async with ServiceClient("http://server", "tml-key", network=api.network) as service:
            await service.create_lora_training_client_async("m")

    asyncio.run(work())
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "success"}}]


def test_leaving_by_an_error_reports_it(api: FakeApi) -> None:
    def fail() -> None:
        with ServiceClient("http://server", "tml-key", network=api.network) as service:
            service.create_lora_training_client("m")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert api.bodies("sessions/s1/finish") == [{"reason": {"type": "errored"}}]


def test_closing_twice_is_harmless(api: FakeApi) -> None:
    service = ServiceClient("http://server", "tml-key", network=api.network)
    service.close()
    service.close()
    assert api.paths() == []
