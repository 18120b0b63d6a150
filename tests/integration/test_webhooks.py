"""Webhooks against a real receiver: signed, at least once, to allowed addresses; no tenant waits for another."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from cotrain_server.webhooks.delivery import GIVEN_UP_AFTER_S, Delivery
from cotrain_server.webhooks.sender import MAX_READ, AddressRefused, CheckedNetwork, Sender, Undelivered
from cotrain_store import redis_keys
from cotrain_store.errors import Fenced, Reason
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.connection import SyncConnection, open_connection, open_sync_connection, stop_tasks
from cotrain_store.tenants.webhooks import DueEvent, Outcome, Webhooks
from tests.support.http_api import ALICE, BOB, Api, running_api
from tests.support.lists import got, save
from tests.support.lives import pass_time
from tests.support.markdown import blocks
from tests.support.processes import Process
from tests.support.redis_server import EmbeddedRedis
from tests.support.refusals import refused
from tests.support.stand_in import stand_in
from tests.support.waiting import until, until_true

LOCAL = ("127.0.0.0/8",)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "webhooks.md"
A, B = TenantId("a"), TenantId("b")


def is_genuine(secret: str, received: Received) -> bool:
    """Verify an event as the documentation says."""
    names: dict[str, Any] = {}
    [block] = blocks(PAGE)
    exec(block.compile(), names)
    return bool(names["is_genuine"](secret, received.headers, received.body))


async def call(api: Api, method: str, path: str, json: Any = None, key: str = ALICE) -> httpx.Response:
    return await api.http.request(method, f"/api/v1/{path}", json=json, headers={"X-API-Key": key})


@asynccontextmanager
async def deliverer(redis: EmbeddedRedis, name: str = "one") -> AsyncIterator[Webhooks]:
    """Deliver as an API process does, looking all the time."""
    connection, sender = open_connection(redis.url), Sender(LOCAL)
    webhooks = Webhooks(connection, name)
    task = asyncio.create_task(Delivery(webhooks, sender, poll_s=0.01).run())
    try:
        yield webhooks
    finally:
        await stop_tasks([task])
        sender.close()
        await connection.aclose()


async def until_recorded(webhooks: Webhooks, tenant: TenantId, **expected: Any) -> None:
    """Wait until the record of a webhook has these values."""

    async def has_them() -> bool:
        return expected.items() <= vars(await webhooks.find(tenant)).items()

    await until_true(has_them)


def url_of(receiver: Receiver) -> str:
    return f"http://127.0.0.1:{receiver.port}/hook?from=cotrain"


async def test_runs_and_checkpoints_are_told_of_and_signed(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, webhook_networks=LOCAL) as api, receiving() as receiver:
        made = (await call(api, "PUT", "webhook", {"url": url_of(receiver)})).json()
        assert made["url"] == url_of(receiver)
        with stand_in(api.services) as worker:
            ended, failed = await api.new_run(), await api.new_run()
            foreign = await api.new_run(BOB)
            await save(api, worker, ended, "kept")
            await api.post("unload_model", {"model_id": ended})
            await api.post("unload_model", {"model_id": foreign}, BOB)
            tenant = (await api.services.tenants.authenticate(ALICE)).id
            worker.execution.fail_run(failed, tenant)
            worker.execution.fail_run(failed, tenant)
            await api.post("unload_model", {"model_id": failed})
        await call(api, "POST", "webhook/test")
        await receiver.until(4)
        events = [json.loads(request.body) for request in receiver.requests]
        assert [event["type"] for event in events] == [
            "checkpoint.saved", "run.ended", "run.failed", "test",
        ]  # fmt: skip
        assert events[0]["data"] == {
            "training_run_id": ended,
            "tinker_path": f"tinker://{ended}/weights/kept",
            "size_bytes": 1000,
        }
        assert [event["data"].get("training_run_id") for event in events[1:]] == [ended, failed, None]
        for request, event in zip(receiver.requests, events, strict=True):
            assert request.line == "POST /hook?from=cotrain HTTP/1.1"
            assert request.headers["webhook-id"] == event["id"]
            assert is_genuine(made["secret"], request)
            assert not is_genuine("whsec_" + "A" * 44, request)
        await until_recorded(api.services.webhooks, tenant, delivered=4)
        shown = await got(api, "webhook")
        assert (shown["waiting"], shown["last_outcome"], shown["last_answer"]) == (0, "delivered", "204")
        assert "secret" not in shown


async def test_a_webhook_is_its_tenants_alone_and_can_be_removed(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        assert (await call(api, "GET", "webhook")).status_code == 404
        assert (await call(api, "POST", "webhook/test")).status_code == 404
        for url in ("http://a.example/", "https://", "https://u:p@a.example/", "ftp://a.example",
                    "https://a.example/#x", "https://a.example/\n", "https://[::1", "x" * 3000):  # fmt: skip
            answer = await call(api, "PUT", "webhook", {"url": url})
            assert answer.status_code in (400, 422), url
        first = (await call(api, "PUT", "webhook", {"url": "https://a.example/x"})).json()
        second = (await call(api, "PUT", "webhook", {"url": "https://a.example/y"})).json()
        assert first["secret"] != second["secret"]
        assert (await call(api, "GET", "webhook", key=BOB)).status_code == 404
        assert (await got(api, "webhook"))["url"] == "https://a.example/y"
        assert (await call(api, "DELETE", "webhook")).status_code == 200
        assert (await call(api, "DELETE", "webhook")).status_code == 404


async def test_a_private_address_is_refused_when_it_is_connected_to() -> None:
    sender = Sender(())
    for url in ("https://127.0.0.1:9/", "https://localhost:9/", "https://[::1]:9/", "http://127.0.0.1/"):
        with pytest.raises(Undelivered, match="no address that webhooks may be sent to"):
            await sender.send(event_for(url), 0)
    sender.close()
    with ThreadPoolExecutor(1) as threads, pytest.raises(AddressRefused):
        await CheckedNetwork([ip_network("10.0.0.0/8")], threads, encrypted=True).connect_tcp("127.0.0.1", 9)


def event_for(url: str) -> DueEvent:
    return DueEvent(A, url, "whsec_AAAA", "e-1", b"{}", 0, 0.0)


async def test_a_redirect_is_not_followed_and_an_endless_answer_is_not_read() -> None:
    sender = Sender(LOCAL)
    async with receiving() as receiver, receiving() as other:
        elsewhere = f"Location: http://127.0.0.1:{other.port}/\r\n".encode()
        receiver.answers = [
            b"HTTP/1.1 302 Found\r\n" + elsewhere + b"Content-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (2 * MAX_READ),
            b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
            b"what?\r\n\r\n",
        ]
        event = event_for(url_of(receiver))
        with pytest.raises(Undelivered, match="answered with status 302"):
            await sender.send(event, 0)
        assert await sender.send(event, 0) == "200"
        for said in ("status 500", "the answer is not HTTP"):
            with pytest.raises(Undelivered, match=said):
                await sender.send(event, 0)
        assert other.requests == []
    sender.close()


async def test_an_event_goes_over_tls_to_a_receiver_whose_certificate_holds(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    await asyncio.to_thread(
        subprocess.check_call,
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(cert, key)
    async with receiving(served) as receiver:
        event = event_for(f"https://localhost:{receiver.port}/")
        trusting = Sender((*LOCAL, "::1"), ssl.create_default_context(cafile=str(cert)))
        assert await trusting.send(event, int(time.time())) == "204"
        trusting.close()
        doubting = Sender((*LOCAL, "::1"))
        with pytest.raises(Undelivered, match="certificate"):
            await doubting.send(event, 0)
        doubting.close()
        assert len(receiver.requests) == 1


async def test_of_a_receiver_that_speaks_another_protocol_no_byte_is_shown() -> None:
    """`b'SSH-2.0-OpenSSH'` named the service, and its version, behind a port."""
    secret = b"SECRET-2.0 of a service\r\n"
    answers = {
        secret: "the answer is not HTTP",
        b"HTTP/1.1 200 OK\r\n" + secret + b"\r\n": "the answer is not HTTP",
        b"HTTP/1.1 " + secret + b"\r\n": "the answer is not HTTP",
        b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n" + secret: "the answer is not HTTP",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + secret: "the answer is not HTTP",
        b"": "the answer is not HTTP",
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(answers_left.pop(0))
        writer.close()

    answers_left, sender = list(answers), Sender(LOCAL)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        event = event_for(f"http://127.0.0.1:{port}/")
        for said in answers.values():
            with pytest.raises(Undelivered, match=f"^{said}$") as refused:
                await sender.send(event, 1)
            assert "SECRET" not in str(refused.value)
    with pytest.raises(Undelivered, match=r"^no connection could be made$"):
        await sender.send(event, 1)
    sender.close()


async def test_what_fails_is_tried_again_and_given_up_after_a_day(empty_redis: EmbeddedRedis) -> None:
    redis = open_sync_connection(empty_redis.url)
    async with receiving() as receiver, deliverer(empty_redis) as webhooks:
        refusal = b"HTTP/1.1 503 Later\r\nContent-Length: 0\r\n\r\n"
        receiver.answers = [refusal, refusal]
        await webhooks.set(A, url_of(receiver))
        first = await webhooks.test(A)
        await until_recorded(webhooks, A, retried=1, waiting=1)
        pass_time(redis, 5_000)
        await until_recorded(webhooks, A, retried=2)
        pass_time(redis, 10_000)
        await until_recorded(webhooks, A, delivered=1, waiting=0)
        assert [request.headers["webhook-id"] for request in receiver.requests] == [first] * 3

        receiver.answers = [refusal] * 20  # a retry of a busy machine may come before the clock is set
        await webhooks.test(A)
        await until_recorded(webhooks, A, retried=3)
        pass_time(redis, GIVEN_UP_AFTER_S * 1000)
        await until_recorded(webhooks, A, given_up=1, waiting=0)
        assert redis.zcard(redis_keys.due_tenants()) == 0
    redis.close()


async def test_an_error_of_our_own_counts_as_an_attempt_and_waits_like_one(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    async def broken(_sender: Sender, event: DueEvent, _at: int) -> str:
        attempts.append(event.id)
        raise ValueError

    monkeypatch.setattr(Sender, "send", broken)
    async with deliverer(empty_redis) as webhooks:
        await webhooks.set(A, "http://127.0.0.1:9/hook")
        event = await webhooks.test(A)
        await until_recorded(webhooks, A, retried=1, waiting=1)
        await webhooks.test(A)  # looked at many times by now, and not sent before its time
        assert "log says how" in str((await webhooks.find(A)).last_answer)
    assert attempts.count(event) == 1


async def test_a_look_that_fails_for_an_error_of_our_own_is_not_the_last(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Webhooks.due
    failed: list[int] = []

    async def broken_once(webhooks: Webhooks, most: int) -> list[DueEvent]:
        if not failed:
            failed.append(most)
            raise ValueError
        return await look(webhooks, most)

    monkeypatch.setattr(Webhooks, "due", broken_once)
    async with receiving() as receiver, deliverer(empty_redis) as webhooks:
        await webhooks.set(A, url_of(receiver))
        await webhooks.test(A)
        await until_recorded(webhooks, A, delivered=1)
    assert failed


async def test_of_looks_that_fail_for_one_cause_the_log_has_the_first(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: asyncio.Queue[int] = asyncio.Queue()

    async def broken(_: Webhooks, most: int) -> list[DueEvent]:
        failed.put_nowait(most)
        raise ValueError

    monkeypatch.setattr(Webhooks, "due", broken)
    with capture_logs() as logged:
        async with deliverer(empty_redis):
            for _ in range(10):
                await failed.get()
    assert [line["event"] for line in logged] == ["webhooks_unread"]


async def test_an_attempt_that_cannot_be_noted_is_not_made_again_at_once_and_holds_no_other_tenant(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, looks = Webhooks.tried, Webhooks.due
    failed: list[TenantId] = []
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def broken_for_a(
        webhooks: Webhooks, event: DueEvent, outcome: Outcome, answer: str, retry_in_s: float = 0.0
    ) -> None:
        if event.tenant == A:
            failed.append(event.tenant)
            raise ValueError
        await note(webhooks, event, outcome, answer, retry_in_s)

    async def counted(webhooks: Webhooks, most: int) -> list[DueEvent]:
        seen.put_nowait(most)
        return await looks(webhooks, most)

    monkeypatch.setattr(Webhooks, "tried", broken_for_a)
    monkeypatch.setattr(Webhooks, "due", counted)
    monkeypatch.setattr("cotrain_server.webhooks.delivery.AT_ONCE", 1)
    async with receiving() as receiver, deliverer(empty_redis) as webhooks:
        await webhooks.set(A, url_of(receiver))
        await webhooks.test(A)
        await receiver.until(1)
        await webhooks.set(B, url_of(receiver))
        await webhooks.test(B)
        await until_recorded(webhooks, B, delivered=1)
        for _ in range(seen.qsize() + 20):
            await seen.get()
    assert failed == [A]
    assert len(receiver.requests) == 2


async def test_a_slow_receiver_holds_no_other_tenant(empty_redis: EmbeddedRedis) -> None:
    async with receiving() as slow, receiving() as quick, deliverer(empty_redis) as webhooks:
        slow.answers = [b""]
        await webhooks.set(A, url_of(slow))
        await webhooks.set(B, url_of(quick))
        await webhooks.test(A)
        await slow.until(1)
        for _ in range(3):
            await webhooks.test(B)
        await until_recorded(webhooks, B, delivered=3)
        assert (await webhooks.find(A)).waiting == 1


async def test_who_takes_over_sends_what_a_dead_process_did_not_note(empty_redis: EmbeddedRedis) -> None:
    redis = open_sync_connection(empty_redis.url)
    connection = open_connection(empty_redis.url)
    dead, other = Webhooks(connection, "dead"), Webhooks(connection, "other")
    async with receiving() as receiver:
        await dead.set(A, url_of(receiver))
        await dead.test(A)
        assert await dead.lead()
        assert not await other.lead()
        [sent] = await dead.due(10)
        redis.delete(redis_keys.webhook_lease())  # as Redis does once it has run out
        async with deliverer(empty_redis, "next") as webhooks:
            await until_recorded(webhooks, A, delivered=1)
            with pytest.raises(Fenced):
                await dead.tried(sent, Outcome.DELIVERED, "204")
        assert [request.headers["webhook-id"] for request in receiver.requests] == [sent.id]
    await connection.aclose()
    redis.close()


async def test_a_thousand_events_wait_and_no_more_and_all_go_with_the_webhook(empty_redis: EmbeddedRedis) -> None:
    redis = open_sync_connection(empty_redis.url)
    connection = open_connection(empty_redis.url)
    webhooks = Webhooks(connection, "one")
    await webhooks.set(A, "https://a.example/")
    redis.hset(redis_keys.events(A), mapping={str(n): "0|0|{}" for n in range(999)})
    await webhooks.test(A)
    with refused(Reason.WEBHOOK_FULL):
        await webhooks.test(A)
    found = await webhooks.find(A)
    assert (found.waiting, found.dropped) == (1_000, 1)
    await webhooks.remove(A)
    assert redis.exists(*(name(A) for name in (redis_keys.webhook, redis_keys.events, redis_keys.due_events))) == 0
    with refused(Reason.WEBHOOK_NOT_FOUND):
        await webhooks.test(A)
    await connection.aclose()
    redis.close()


async def test_a_killed_process_loses_no_event(
    empty_redis: EmbeddedRedis, redis: SyncConnection, tmp_path: Path
) -> None:
    settings = {
        "COTRAIN_REDIS_URL": empty_redis.url, "COTRAIN_DATA_DIR": str(tmp_path),
        "COTRAIN_PORT": "0", "COTRAIN_WEBHOOK_NETWORKS": "127.0.0.1",
        "COTRAIN_API_KEYS": "tml-alice_secret-of-alice",
    }  # fmt: skip
    connection = open_connection(empty_redis.url)
    webhooks = Webhooks(connection, "none of them")
    async with receiving() as receiver:
        receiver.answers = [b""]  # the first request is never answered
        await webhooks.set(A, f"http://127.0.0.1:{receiver.port}/")
        event = await webhooks.test(A)
        with Process("cotrain_server", settings, tmp_path / "first.log") as first:
            await receiver.until(1)
            await asyncio.to_thread(first.kill)
            redis.delete(redis_keys.webhook_lease())  # otherwise it expires after ten seconds
            with Process("cotrain_server", settings, tmp_path / "second.log"):
                await receiver.until(2)
                await until(lambda: redis.hget(redis_keys.webhook(A), "delivered") == b"1")
        assert [request.headers["webhook-id"] for request in receiver.requests] == [event] * 2
        assert redis.hlen(redis_keys.events(A)) == 0
    await connection.aclose()


@dataclass(frozen=True)
class Received:
    """One request."""

    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Stored requests, and the answers to the next ones."""

    port: int = 0
    requests: list[Received] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    """Answers to the next requests, then 204. An empty one means no answer until `let_go`."""
    came: asyncio.Condition = field(default_factory=asyncio.Condition)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, count: int) -> None:
        """Wait until `count` requests have arrived."""
        async with self.came:
            await self.came.wait_for(lambda: len(self.requests) >= count)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive and answer one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.split(": ", 1) for line in head[1:] if line)
            headers = {name.lower(): value for name, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append(Received(head[0], headers, body))
            async with self.came:
                self.came.notify_all()
            answer = self.answers.pop(0) if self.answers else b"HTTP/1.1 204 No Content\r\n\r\n"
            if not answer:
                await self.let_go.wait()
            writer.write(answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """Listen on a free port of 127.0.0.1."""
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        receiver.let_go.set()
        server.close()
