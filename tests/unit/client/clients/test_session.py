from __future__ import annotations

import asyncio

import httpx
import pytest

from cotrain.clients.session import WARN_AFTER_MISSED, Session
from cotrain.transport.http import Transport
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

        transport = Transport("http://server", "k", network=api.network, sleep=wait)
        session = Session(transport, None)
        await session.id()
        waiting = asyncio.create_task(enough.wait())
        assert session.heartbeat is not None
        await asyncio.wait([waiting, session.heartbeat], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await session.finish("success")
        await transport.close()

    asyncio.run(live())
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
