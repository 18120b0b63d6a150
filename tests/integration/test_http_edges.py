"""The edges of HTTP: too large, wrong type, a store that is away, metrics, and what logs may say."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
import zstandard
from starlette.types import Message

from cotrain.wire.codec import PROTOBUF
from cotrain_server.http import request_body as bodies
from cotrain_server.http import tenant_routes
from cotrain_server.routes import status
from cotrain_server.ui import page
from cotrain_server.views import fleet_metrics as collector
from cotrain_store.monitoring.definitions import METRICS, Source
from cotrain_store.monitoring.logs import configure_logs
from cotrain_store.monitoring.metrics import REGISTRIES
from tests.support.http_api import ALICE, BOB, OPERATOR, POOL, pass_body, running_api, sample_body
from tests.support.redis_server import EmbeddedRedis
from tests.support.ui import log_in

ROOT = Path(__file__).parents[2]

CANARY_TOKEN = 31337
CANARY_TEXT = "canary-prompt"


@pytest.fixture(scope="module")
def own_redis() -> Iterator[EmbeddedRedis]:
    """A Redis that may be killed."""
    with EmbeddedRedis() as server:
        yield server


async def test_a_body_over_the_limit_is_refused_in_every_form(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, max_body_bytes=2048) as api:
        bomb = zstandard.compress(bytes(1 << 20))
        for content, headers in (
            (bytes(4096), {"content-type": PROTOBUF}),
            (bomb, {"content-type": PROTOBUF, "content-encoding": "zstd"}),
            (b"[" * 4096, {"content-type": "application/json"}),
        ):
            answer = await api.post("forward_backward", content=content, headers=headers)
            assert answer.status_code == 413
            assert answer.json()["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b"x", {"content-type": "text/plain"}, 415),
        (b"x", {"content-type": "application/json"}, 400),
        (b"\xff\xff", {"content-type": PROTOBUF}, 400),
        (b"", {"content-type": PROTOBUF}, 400),
        (b"x", {"content-type": PROTOBUF, "content-encoding": "zstd"}, 400),
        (b"x", {"content-type": PROTOBUF, "content-encoding": "gzip"}, 415),
        (b'{"a":' * 99, {"content-type": "application/json"}, 400),
        (b'{"model_id":"x","seq_id":1}', {"content-type": "application/json"}, 404),
    ],
)
async def test_what_cannot_be_read_is_the_callers_error(
    empty_redis: EmbeddedRedis, content: bytes, headers: dict[str, str], code: int
) -> None:
    async with running_api(empty_redis.url) as api:
        answer = await api.post("forward_backward", content=content, headers=headers)
        assert answer.status_code == code
        assert set(answer.json()) == {"detail", "code", "request_id"}
        assert answer.headers["x-request-id"] == answer.json()["request_id"]


async def test_only_training_takes_large_bodies(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        metadata = {"user_metadata": {"x": "y" * (1 << 20)}}
        assert (await api.post("create_session", metadata)).status_code == 413


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400])
async def test_metadata_with_a_number_that_json_does_not_have_is_refused(
    empty_redis: EmbeddedRedis, number: str
) -> None:
    async with running_api(empty_redis.url) as api:
        session = (await api.post("create_session", {})).json()["session_id"]
        run = {"session_id": session, "base_model": POOL.base_model, "lora_config": {"rank": 4}}
        path = f"tinker://{session}:train:0/weights/a"
        for call, body in (
            ("create_session", {}),
            ("create_model", {**run, "model_seq_id": 0}),
            ("load_weights", {**run, "model_seq_id": 1, "path": path}),
        ):
            text = json.dumps({**body, "user_metadata": {"a": [{"b": "?"}]}})
            content = text.replace('"?"', number).encode()
            answer = await api.post(call, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, call
            assert answer.json()["detail"].startswith("user_metadata holds NaN, an infinity, or a")


async def test_a_body_that_does_not_arrive_is_given_up(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "RECEIVE_TIMEOUT_S", 0.01)

    async def trickle() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with running_api(empty_redis.url) as api:
        answer = await api.post("create_session", content=trickle())
        assert (answer.status_code, answer.json()["code"]) == (408, "body_too_slow")


async def test_a_client_that_hangs_up_while_sending_is_no_crash(
    empty_redis: EmbeddedRedis, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_api(empty_redis.url) as api:
        messages = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/v1/forward",
            "query_string": b"",
            "headers": [(b"x-api-key", ALICE.encode())],
            "client": ("127.0.0.1", 1),
        }
        await api.app(scope, receive, send)
    assert "request_crashed" not in "".join(capfd.readouterr())


async def test_one_tenant_cannot_hold_every_connection(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, long_poll_s=40, quotas={"polls": 1}) as api:
        alices, bobs = await api.new_run(), await api.new_run(BOB)
        held = asyncio.create_task(api.post("retrieve_future", {"request_id": f"{alices}:0"}))
        await api.until_held(held)
        second = await api.post("retrieve_future", {"request_id": f"{alices}:0"})
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        other = asyncio.create_task(api.post("retrieve_future", {"request_id": f"{bobs}:0"}, key=BOB))
        await api.until_held(held, other)
        api.services.drain()
        assert (await held).status_code == (await other).status_code == 408
        assert not api.services.polls_by_tenant.total()


async def test_while_redis_is_away_submits_say_when_to_come_back_and_polls_are_held(own_redis: EmbeddedRedis) -> None:
    async with running_api(own_redis.url) as api:
        run, sampler = await api.new_run(), await api.new_sampler()
        own_redis.kill()
        submit = await api.post("forward_backward", pass_body(run, 1))
        assert submit.status_code == 503
        assert submit.headers["retry-after"] == "1"
        sample = await api.post("asample", sample_body(sampler, 0))
        assert (sample.status_code, sample.headers["retry-after"]) == (503, "1")
        target = {"type": "sampling_session", "sampling_session_id": sampler}
        polls = await asyncio.gather(
            api.post("retrieve_future", {"request_id": f"{run}:0"}),
            api.post("retrieve_future", {"request_id": f"{sampler}:0"}),
            api.post("retrieve_futures", {"target": target}),
            api.post("cancel_future", {"request_id": f"{sampler}:0"}),
        )
        for poll in polls:
            assert poll.status_code == 408
            assert poll.json()["queue_state"] == "paused_capacity"
        readiness = await api.http.get("/readyz")
        assert readiness.json()["reasons"][0] == "Redis does not answer."
        assert "cotrain_redis_up 0.0" in (await api.http.get("/metrics/fleet", headers=OPERATOR)).text
        assert (await api.http.get("/healthz")).status_code == 200
        own_redis.restart()
        answer = await api.post("forward_backward", pass_body(run, 1))
        assert answer.json()["request_id"] == f"{run}:1"


async def test_a_redis_that_stands_still_is_told_and_not_waited_for(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(own_redis.url) as api:
        await log_in(api.http, OPERATOR["X-API-Key"])
        own_redis.stand_still()
        try:
            with monkeypatch.context() as brief:
                for module in (collector, status, page):
                    brief.setattr(module, "FLEET_TIMEOUT_S", 0.2)
                brief.setattr(tenant_routes, "READ_TIMEOUT_S", 0.2)
                logged_in = await api.http.get("/ui/settings")
                listed = await api.http.get("/api/v1/admin/workers", headers=OPERATOR)
                metrics = (await api.http.get("/metrics/fleet", headers=OPERATOR)).text.splitlines()
                answer = await api.http.get("/status", headers=OPERATOR)
        finally:
            own_redis.go_on()
        assert [line for line in metrics if line.startswith("cotrain_redis_up")] == ["cotrain_redis_up 0.0"]
        for waited in (answer, listed):
            assert (waited.status_code, waited.json()["code"]) == (503, "store_unavailable")
        assert (logged_in.status_code, "Redis does not respond" in logged_in.text) == (503, True)
        assert (await api.http.get("/status", headers=OPERATOR)).json()["reasons"][0] == "No scheduler is running."


async def test_a_poll_by_a_key_not_seen_lately_is_held_as_well(own_redis: EmbeddedRedis) -> None:
    async with running_api(own_redis.url) as api:
        key = await api.services.tenants.issue("carol")
        request = {"request_id": f"{await api.new_run(key)}:0"}
        api.services.tenants._known.clear()
        own_redis.kill()
        for poll in (await api.post("retrieve_future", request, key), await api.post("retrieve_future", request)):
            assert poll.status_code == 408
        own_redis.restart()


async def test_readyz_names_what_is_missing(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, base_models="tiny/model,other") as api:
        answer = await api.http.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == [
            "No scheduler is running.",
            "No worker for tiny/model is running.",
            "No worker for other is running.",
        ]


def test_what_operators_are_told_to_watch_is_there() -> None:
    """That each of these is really shown, by its process: `test_metrics_page` and `test_prometheus`."""
    page = (ROOT / "docs" / "operate" / "alerts.md").read_text()
    told = set(re.findall(r"`(cotrain_(?!store)[a-z_]+)`", page))
    assert len(told) > 8
    assert told - METRICS.keys() == set()


def counted() -> list[float]:
    """Read how many passes and samples this process accepted, and how many it had accepted before."""
    names = [("accepted", {"op": "forward_backward"}), ("accepted", {"op": "sample"}), ("duplicate", {})]
    return [
        REGISTRIES[Source.API].get_sample_value(f"cotrain_requests_{name}_total", labels) or 0.0
        for name, labels in names
    ]


async def test_a_base_model_that_is_served_no_more_takes_no_new_runs(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url, base_models="other") as api:
        assert (await api.get("get_server_capabilities")).json()["supported_models"] == []
        session = (await api.post("create_session", {})).json()["session_id"]
        refused = await api.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny/model"})
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith("Base model 'tiny/model' is not served here.")


async def test_no_number_of_the_fleet_is_exported_by_each_process(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        await api.new_run()
        of_process, of_fleet = [
            set(re.findall(r"# TYPE (\w+)", (await api.http.get(path, headers=OPERATOR)).text))
            for path in ("/metrics", "/metrics/fleet")
        ]
    assert {"cotrain_http_requests_total", "cotrain_longpoll_waiters"} <= of_process
    assert {"cotrain_cycles_total", "cotrain_queue_ops", "cotrain_disk_free_bytes"} <= of_fleet
    assert of_process & of_fleet == set()


async def test_two_scrapes_tell_of_this_process_and_of_the_pool(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        run = await api.new_run()
        sampler = await api.new_sampler()
        before = counted()
        for _ in range(2):
            await api.post("forward_backward", pass_body(run, 1))
            await api.post("asample", sample_body(sampler, 0))
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 1, 2]
        alice = (await api.services.tenants.authenticate(ALICE)).id
        lines = (await api.http.get("/metrics/fleet", headers=OPERATOR)).text.splitlines()
        assert f'cotrain_samples_waiting{{pool="tiny/model",tenant="{alice}"}} 1.0' in lines
        assert f'cotrain_queue_tokens{{pool="tiny/model",tenant="{alice}"}} 3.0' in lines
        assert 'cotrain_cycles_total{pool="tiny/model"} 0.0' in lines
        assert "cotrain_redis_up 1.0" in lines
        assert 'cotrain_worker_up{pool="tiny/model",worker="w0"} 0.0' in lines  # it never beat
        route = 'cotrain_http_requests_total{code="200",route="/api/v1/forward_backward"}'
        own = (await api.http.get("/metrics", headers=OPERATOR)).text.splitlines()
        assert any(line.startswith(route) for line in own)
        assert not any(run in line or sampler in line for line in [*lines, *own])


async def test_a_crash_is_answered_with_a_reference_and_nothing_of_what_happened(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(empty_redis.url) as api:

        async def crash(*_: object) -> None:
            raise RuntimeError(CANARY_TEXT)

        monkeypatch.setattr(api.services.records, "run", crash)
        answer = await api.post("get_info", {"model_id": "x"})
        assert answer.status_code == 500
        assert answer.json()["detail"] == f"Internal error (ref {answer.json()['request_id']})."
        assert CANARY_TEXT not in answer.text


async def test_no_key_token_or_text_of_a_tenant_gets_into_the_log(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logs("api", "debug")
    # A cached logger would go on writing to the stream of this test after it has ended.
    structlog.configure(cache_logger_on_first_use=False)
    try:
        async with running_api(empty_redis.url) as api:
            run = await api.new_run()
            await api.post("forward_backward", pass_body(run, 1, [CANARY_TOKEN]))
            await api.post("forward_backward", pass_body(run, 2, loss_fn=CANARY_TEXT))
            await api.post("forward_backward", pass_body(run, 2, loss_fn="other"))
            await api.post("create_model", {"session_id": CANARY_TEXT, "base_model": CANARY_TEXT})
            await api.post("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "path": CANARY_TEXT})
            sampler = await api.new_sampler()
            source = {"session_id": run.partition(":")[0], "sampling_session_seq_id": 0}
            for path in (CANARY_TEXT, f"tinker://{run}/weights/{CANARY_TEXT}"):
                await api.post("create_sampling_session", {**source, "model_path": path})
            for params in ({"stop": CANARY_TEXT}, {"stop": [CANARY_TOKEN]}, {"seed": CANARY_TEXT}):
                await api.post("asample", sample_body(sampler, 0, sampling_params=params))
            await api.post("create_session", {"user_metadata": {CANARY_TEXT: CANARY_TEXT}})
            await api.post("telemetry", {"events": [{"traceback": CANARY_TEXT}]})
            await api.post("client/config", {}, key=f"{ALICE}-wrong")
            await api.post("forward_backward", content=CANARY_TEXT.encode())

            async def crash(*_: object) -> None:
                raise RuntimeError(CANARY_TEXT)

            monkeypatch.setattr(api.services.records, "run", crash)
            await api.post("get_info", {"model_id": run})
    finally:
        structlog.reset_defaults()
    written = "".join(capfd.readouterr())
    events = [json.loads(line)["event"] for line in written.splitlines() if line.startswith("{")]
    assert "request_crashed" in events
    assert "request_refused" in events
    for secret in (str(CANARY_TOKEN), CANARY_TEXT, "secret-of-alice"):
        assert secret not in written
    assert logging.getLogger("uvicorn.access").handlers == []


async def test_every_answer_has_an_id_that_its_client_may_choose(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        chosen = {"X-Request-Id": "mine-1"}
        for answer in (
            await api.http.get("/healthz", headers=chosen),
            await api.http.get("/nothing", headers=chosen),
            await api.post("forward", {}, headers=chosen),
            await api.post("retrieve_future", {"request_id": "s:train:0:1"}, headers=chosen),
            await api.post("create_session", {}, headers=chosen),
        ):
            assert answer.headers.get_list("x-request-id") == ["mine-1"]
            assert answer.status_code < 400 or answer.json()["request_id"] == "mine-1"
        others = [(await api.http.get("/healthz")).headers["x-request-id"] for _ in range(2)]
        assert others[0] != others[1]


async def test_lines_name_their_request_and_each_answer_is_one_where_that_is_asked_for(
    empty_redis: EmbeddedRedis, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logs("api", "debug")
    structlog.configure(cache_logger_on_first_use=False)
    try:
        async with running_api(empty_redis.url, access_log=True) as api:
            run = await api.new_run()
            alice = (await api.services.tenants.authenticate(ALICE)).id
            await api.post("forward_backward?token=hidden", pass_body(run, 1), headers={"X-Request-Id": "mine"})
            await api.http.get("/healthz")
    finally:
        structlog.reset_defaults()
    written = capfd.readouterr().err
    lines = [json.loads(line) for line in written.splitlines()]
    accepted, answered = [line for line in lines if line.get("http_request") == "mine"]
    assert (accepted["event"], accepted["level"]) == ("request_accepted", "debug")
    assert accepted["request"] == f"{run}:1"
    assert (answered["event"], answered["method"], answered["code"]) == ("request_answered", "POST", 200)
    for line in (accepted, answered):
        assert (line["tenant"], line["run"], line["seq"]) == (alice, run, 1)
    assert lines[-1]["route"] == "/healthz"
    assert not {"run", "seq"} & lines[-1].keys()
    assert "hidden" not in written


async def test_slow_senders_of_one_tenant_cannot_fill_the_memory(
    empty_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(empty_redis.url) as api:
        monkeypatch.setattr(api.services.body_memory, "_limit", 300)
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b"[" + b" " * 250
            arrived.set()
            await go_on.wait()
            yield b"]"

        headers = {"X-API-Key": ALICE, "Content-Type": "application/json"}
        url = "/api/v1/forward_backward"
        sending = asyncio.create_task(api.http.post(url, content=slowly(), headers=headers))
        await arrived.wait()
        over = await api.http.post(url, content=b"[" + b" " * 60 + b"]", headers=headers)
        assert (over.status_code, over.json()["code"]) == (429, "too_many_bodies")
        assert over.headers["retry-after"] == "1"
        zeros = zstandard.compress(b"[" + b" " * 60 + b"]")
        packed = {**headers, "Content-Encoding": "zstd"}
        assert (await api.http.post(url, content=zeros, headers=packed)).status_code == 429
        other = {**headers, "X-API-Key": BOB}
        assert (await api.http.post(url, content=b"[]", headers=other)).status_code == 400
        go_on.set()
        assert (await sending).status_code == 400
        assert (await api.post("create_session", {"tags": ["x" * 100]})).status_code == 200
