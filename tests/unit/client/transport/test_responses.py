"""Retries and their log, and addresses with the wrong scheme: the error suggests the other one."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest
from typer.testing import CliRunner

from cotrain import BadRequestError, ServiceClient, SettingsMissing
from cotrain.cli import command_line
from cotrain.errors import APIConnectionError, APIError, APIStatusError, APITimeoutError, RateLimitError, status_error
from cotrain.transport import responses as module
from cotrain.transport.responses import WARN_AFTER_S, WARN_AGAIN_S, Contact, Patience, RetryPolicy
from tests.support.fake_api import FakeApi

URL = "http://server:8000"
REFUSED = APIConnectionError("cannot reach http://server:8000: refused")


class Time:
    """Clock that advances only in sleeps."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(module, "time", time)
    return time


def patience_with(time: Time, contact: Contact) -> Patience:
    return Patience(RetryPolicy(), contact, time.sleep, _since=time.now, _began=time.now)


async def until_enough(patience: Patience, error: APIError) -> APIError:
    while True:
        try:
            await patience.wait_out(error)
        except APIError as enough:
            return enough


async def test_a_server_that_never_answered_is_soon_an_error_that_names_it(time: Time) -> None:
    began = time.now
    enough = await until_enough(patience_with(time, Contact(URL)), REFUSED)
    assert 30 < time.now - began < 45
    assert str(enough).startswith(f"{REFUSED} (tried ")
    assert f"Nothing has ever answered at {URL}" in str(enough)
    assert enough.__cause__ is REFUSED


async def test_a_server_that_answered_before_is_retried_for_minutes(time: Time) -> None:
    contact = Contact(URL)
    contact.answered()
    began = time.now
    enough = await until_enough(patience_with(time, contact), APITimeoutError("slow"))
    assert 300 < time.now - began < 315
    assert type(enough) is APITimeoutError
    assert "Nothing has ever answered" not in str(enough)
    assert re.search(r"times in 3[01][0-9] s", str(enough))  # the last pause is up to 10 s long


async def test_the_last_refusal_is_raised_unchanged(time: Time) -> None:
    busy = RateLimitError("full", 429, None)
    assert await until_enough(patience_with(time, Contact(URL)), busy) is busy


async def test_an_answer_of_the_server_restarts_the_time_limit(time: Time) -> None:
    patience = patience_with(time, Contact(URL))
    for _ in range(20):
        await patience.wait_out(REFUSED)
        patience.renew()
    began = time.now
    await until_enough(patience, REFUSED)
    assert time.now - began > 30


@pytest.mark.parametrize("calls", [1, 5])
async def test_an_outage_is_logged_once_and_so_is_its_end(
    time: Time, caplog: pytest.LogCaptureFixture, calls: int
) -> None:
    caplog.set_level(logging.INFO)
    contact = Contact(URL)
    for _ in range(2):
        contact.answered()
        waiting = [patience_with(time, contact) for _ in range(calls)]
        while time.now < waiting[0]._since + 2 * WARN_AFTER_S:
            for patience in waiting:
                await patience.wait_out(REFUSED)
    contact.answered()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2
    assert "still trying, for 300 s in all" in caplog.messages[0]
    assert caplog.messages[1].startswith(f"{URL} answers again, after ")


async def test_a_short_outage_is_not_logged(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    contact = Contact(URL)
    await patience_with(time, contact).wait_out(REFUSED)
    contact.answered()
    assert not caplog.records


def test_delays_double_up_to_the_longest() -> None:
    policy = RetryPolicy()
    waits = [policy.delay_s(failures, REFUSED, jitter=0.0) for failures in range(1, 8)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert policy.delay_s(10_000, REFUSED, jitter=1.0) == 7.5


# ---- Log messages during a wait -------------------------------------------------------------------

FULL = "512 requests wait: ops of COTRAIN_QUOTAS is 512."


@pytest.mark.parametrize("status", [429, 503])
async def test_the_reason_of_a_long_wait_is_logged_once_for_all_calls(
    time: Time, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    contact = Contact(URL)
    waiting = [patience_with(time, contact) for _ in range(5)]
    while time.now < waiting[0]._since + 4 * WARN_AFTER_S:
        for number, patience in enumerate(waiting):  # each is refused with its own numbers
            await patience.wait_out(status_error(status, f"{number}: {FULL}", None))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert FULL in caplog.messages[0]


async def test_a_short_refusal_is_not_logged(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    patience = patience_with(time, Contact(URL))
    while time.now < patience._since + WARN_AFTER_S - 3:
        await patience.wait_out(status_error(429, FULL, None, retry_after_s=1.0))
    assert not caplog.records


async def test_a_long_wait_is_logged_again_after_a_while(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    contact = Contact(URL)
    for _ in range(2):
        contact.busy(RateLimitError(FULL, 429, None), WARN_AFTER_S)
        time.now += WARN_AGAIN_S
    assert len(caplog.records) == 2


def pending(reason: str | None) -> APIStatusError:
    state = {"queue_state": "paused_capacity", "queue_state_reason": reason}
    return status_error(408, "not yet", state)


async def test_a_changing_queue_position_is_no_warning(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    patience = patience_with(time, Contact(URL))
    state = {"queue_state": "active", "queue_state_reason": "position 1 in its run's queue"}
    for _ in range(3):
        time.now += 45.0
        patience.pending(status_error(408, "not yet", state))
    assert caplog.messages == []


async def test_a_reason_whose_numbers_change_is_logged_once(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    patience = patience_with(time, Contact(URL))
    for number in (9, 5, 2):
        time.now += 45.0
        patience.pending(pending(f"position {number}"))
    assert len(caplog.messages) == 1


async def test_the_reason_of_a_pending_result_is_logged_once(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    patience = patience_with(time, Contact(URL))
    for reason in [None, None, "waiting for seq_id 3, which never came"] * 3:
        time.now += 45.0  # as long as a poll is held
        patience.pending(pending(reason))
    (message,) = caplog.messages
    assert message.endswith(": waiting for seq_id 3, which never came")


AT_ONCE = RetryPolicy(give_up_after_s=0.0)
PLAIN = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Answer every request with these bytes and close the connection. Yield host and port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer, suppress(OSError):  # the client may have closed it already
                    peer.recv(65_536)
                    peer.sendall(answer)
                    peer.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=120)


def test_https_to_an_http_server_is_reported_and_not_retried() -> None:
    with answering(PLAIN) as host, ServiceClient(f"https://{host}", "tml-a") as service:
        message = rf"^https://{host} does not speak https: try http://{host}$"
        with pytest.raises(SettingsMissing, match=message):
            service.get_server_capabilities()


def test_top_reports_a_wrong_scheme_too() -> None:
    with answering(PLAIN) as host:
        asked = ["top", "--once", "--base-url", f"https://{host}"]
        result = CliRunner().invoke(command_line([]), asked, env={"COTRAIN_API_KEY": "tml-a"})
    assert (result.exit_code, f"try http://{host}" in result.output) == (1, True)


def test_http_to_a_server_that_hangs_up_suggests_https() -> None:
    with (
        answering(b"") as host,
        ServiceClient(f"http://{host}", "tml-a", policy=AT_ONCE) as service,
        pytest.raises(APIConnectionError, match=f"If it speaks https, try https://{host}"),
    ):
        service.get_server_capabilities()


def test_http_to_an_https_proxy_suggests_https() -> None:
    page = "<html>400 The plain HTTP request was sent to HTTPS port</html>"
    refusal = httpx.Response(400, text=page, headers={"Content-Type": "text/html"})
    api = FakeApi(answers={"get_server_capabilities": [refusal]})
    with (
        ServiceClient("http://proxy:8443", "tml-a", network=api.network) as service,
        pytest.raises(BadRequestError, match=r"Bad Request; try https://proxy:8443$"),
    ):
        service.get_server_capabilities()
