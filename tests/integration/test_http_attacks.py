"""Attacks on an API process, by raw bytes or by use of resources: other tenants are not affected."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard

from bench.neighbours.attacks import (
    JSON,
    PROTOBUF,
    ZSTD,
    deflated_json_body,
    empty_datums_body,
    empty_fields_body,
    tiny_datums_body,
    wrong_numbers_body,
)
from cotrain.wire.proto import wire_pb2
from cotrain.wire.sampling import MAX_RETRIEVED
from cotrain_server.limits import WRONG_KEYS_PER_MINUTE, tenant_requests
from cotrain_server.parser import ChildProcess
from cotrain_store import redis_keys
from cotrain_store.redis_client.clients import BatchingRedis
from cotrain_store.results.completions import ACKNOWLEDGED_AT_ONCE
from tests.support.http_api import ALICE, BOB, POOL, Api, pass_body
from tests.support.redis_server import EmbeddedRedis
from tests.warm.popen import Popen, run


async def test_small_json_of_ten_million_lists_is_rejected_with_its_limit(api: Api) -> None:
    for path, limit in (("forward", 262_144), ("asample", 262_144), ("create_session", 20_000)):
        answer = await api.post(path, content=deflated_json_body(900_000), headers=JSON | ZSTD)
        assert answer.status_code == 413
        assert f"more than {limit} lists and objects" in answer.json()["detail"]
    answer = await api.post("forward", content=deflated_json_body(), headers=JSON | ZSTD)
    assert answer.status_code == 413


async def test_a_pass_of_too_many_empty_datums_takes_its_seq_and_fails(api: Api) -> None:
    run = await api.new_run()
    head = wire_pb2.ForwardBackwardRequest(model_id=run, seq_id=1).SerializeToString()
    body = zstandard.compress(head + b"\x1a\x00" * 400_000)
    answer = await api.post("forward_backward", content=body, headers=PROTOBUF | ZSTD)
    assert answer.status_code == 200, answer.text
    # It keeps its seq, so the next request is accepted as the next one.
    assert (await api.post("forward_backward", pass_body(run, 2))).status_code == 200


async def test_a_pass_without_a_run_is_rejected(api: Api) -> None:
    answer = await api.post("forward_backward", content=empty_datums_body(), headers=PROTOBUF | ZSTD)
    assert answer.status_code == 404


async def test_more_ids_than_any_sdk_sends_are_rejected_by_field(api: Api) -> None:
    sampler = await api.new_sampler()
    ids = [f"{sampler}:{seq}" for seq in range(MAX_RETRIEVED + 1)]
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    body = {"target": target, "timeout": 0.0, "retrieved_request_ids": ids}
    answer = await api.post("retrieve_futures", body)
    assert answer.status_code == 422
    assert "retrieved_request_ids" in answer.text
    assert str(MAX_RETRIEVED) in answer.text
    assert (await api.post("retrieve_futures", {**body, "retrieved_request_ids": ids[1:]})).is_success


async def test_other_commands_run_between_the_ids_of_twelve_retrieves(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve at once had blocked Redis for 5.8 s; now a batch of commands contains one script."""
    sampler = await api.new_sampler()
    ids = [f"{sampler}:{seq}" for seq in range(1_000)]
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    body = {"target": target, "timeout": 0.0, "retrieved_request_ids": ids}
    max_ids, answers = 0, BatchingRedis._answers

    async def watched(redis: BatchingRedis, batch: list[tuple[tuple[bytes, ...], object]]) -> object:
        nonlocal max_ids
        given = [argument for args, *_ in batch for argument in args]
        in_batch = sum(str(each).count(":sample:") for each in given)
        max_ids = max(max_ids, in_batch)
        return await answers(redis, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(BatchingRedis, "_answers", watched)
    retrieves = [asyncio.create_task(api.post("retrieve_futures", body)) for _ in range(12)]
    sessions = 0
    while not all(retrieve.done() for retrieve in retrieves):
        assert (await api.post("create_session", {}, BOB)).is_success
        sessions += 1
    assert all([(await retrieve).is_success for retrieve in retrieves])
    # The 12 scripts of a thousand ids each had come in one batch, together with the requests of
    # other tenants.
    assert ACKNOWLEDGED_AT_ONCE <= max_ids <= 2 * ACKNOWLEDGED_AT_ONCE
    assert sessions > 5


async def test_open_requests_are_limited_per_tenant(api: Api) -> None:
    api.services.tenant_requests = tenant_requests(limit=2)
    half = b'{"a":'

    async def slowly() -> AsyncIterator[bytes]:
        yield half
        arrived.release()
        await ended.wait()
        yield b"1}"

    arrived, ended = asyncio.Semaphore(0), asyncio.Event()
    slow = [asyncio.create_task(api.post("telemetry", content=slowly(), headers=JSON)) for _ in range(2)]
    for _ in slow:
        await arrived.acquire()
    refused = await api.post("telemetry", {}, ALICE)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["code"] == "too_many_connections"
    assert (await api.post("telemetry", {}, BOB)).is_success
    ended.set()
    assert [(await each).is_success for each in slow] == [True, True]
    assert (await api.post("telemetry", {}, ALICE)).is_success


async def test_thirty_three_million_fields_without_a_run_are_rejected(api: Api) -> None:
    """6 KB had blocked one of two threads for half a minute."""
    body = empty_fields_body()
    assert len(body) < 8_000
    answer = await api.post("forward_backward", content=body, headers=PROTOBUF | ZSTD)
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("model_id must come before the first datum")


async def test_a_pass_that_takes_too_long_to_parse_takes_its_seq_and_fails(api: Api) -> None:
    run = await api.new_run()
    parser = api.services.parser
    parser._idle = deque([ChildProcess(max_cpu_s=0.05)])
    try:
        body = tiny_datums_body(run)
        answer = await api.post("forward_backward", content=body, headers=PROTOBUF | ZSTD)
    finally:
        parser._idle.pop().stop()
        parser._idle.extend(parser._children)
    assert answer.status_code == 200, answer.text
    assert (await api.post("forward_backward", pass_body(run, 2))).status_code == 200
    queued = await api.services.connection.hgetall(redis_keys.ops(POOL.id, run))
    kinds = [queued[seq].partition(b"|")[0] for seq in (b"1", b"2")]
    assert kinds == [b"rejected", b"forward_backward"]


async def test_a_pass_of_many_datums_is_parsed_in_a_process_and_accepted(api: Api) -> None:
    run = await api.new_run()
    body = tiny_datums_body(run, 2_500)
    answer = await api.post("forward_backward", content=body, headers=PROTOBUF | ZSTD)
    assert answer.status_code == 200, answer.text
    assert any(child.pid for child in api.services.parser._children)


async def test_millions_of_invalid_numbers_are_rejected_at_the_first(api: Api) -> None:
    """A description of each error took 14 GB and two minutes."""
    chunks = zstandard.compress(b'{"prompt": {"chunks": [' + b"1," * 100_000 + b"1]}}")
    for path, body in (("/oai/api/v1/completions", wrong_numbers_body(100_000)), ("/api/v1/asample", chunks)):
        headers = {"x-api-key": ALICE} | JSON | ZSTD
        answer = await api.http.post(path, content=body, headers=headers)
        assert answer.status_code == 400
        more = re.search(r"and (\d+) more", answer.text)
        assert more is None or int(more[1]) < 10


PATIENCE_S = 120.0
Address = tuple[str, int]


@contextmanager
def api_process(redis_url: str, folder: Path, **settings: str) -> Iterator[Address]:
    """Run `python -m cotrain_server`; connections wait in its socket until it accepts them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = {
            "REDIS_URL": redis_url, "DATA_DIR": str(folder), "API_KEYS": ALICE,
            **settings,
        }  # fmt: skip
        environment = {**os.environ, **{f"COTRAIN_{name}": value for name, value in given.items()}}
        command = [sys.executable, "-m", "cotrain_server", "--listen-fd", str(listener.fileno())]
        process = Popen(command, env=environment, pass_fds=(listener.fileno(),))
        try:
            yield listener.getsockname()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def answers(address: Address, request: bytes) -> bytes:
    """Send bytes. Return everything received until the server closes the connection."""
    with socket.create_connection(address, PATIENCE_S) as connection:
        connection.sendall(request)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def status_of(address: Address, path: str, *headers: str, version: str = "1.1") -> int:
    lines = [f"GET {path} HTTP/{version}", *headers, "Connection: close", "", ""]
    return int(answers(address, "\r\n".join(lines).encode()).split()[1])


def test_ambiguous_or_spoofed_requests_are_rejected(empty_redis: EmbeddedRedis, tmp_path: Path) -> None:
    with api_process(empty_redis.url, tmp_path) as address:
        smuggled = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        for route in (b"/healthz", b"/api/v1/client/config"):
            twice = (
                b"POST " + route + b" HTTP/1.1\r\nHost: x\r\nX-API-Key: " + ALICE.encode() + b"\r\n"
                b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            )
            answer = answers(address, twice + smuggled)
            assert answer.startswith(b"HTTP/1.1 400 "), answer
            assert answer.count(b"HTTP/1.1") == 1, answer

        # A proxy without headers of its own: nginx with nothing but `proxy_pass`.
        host = f"Host: 127.0.0.1:{address[1]}"
        for version in ("1.0", "1.1"):
            assert status_of(address, "/metrics", host, version=version) == 404
            assert status_of(address, "/status", host, version=version) == 401
        key = (tmp_path / "admin-key").read_text().strip()
        for path in ("/metrics", "/status"):
            assert status_of(address, path, host, f"X-API-Key: {key}") == 200


@pytest.mark.parametrize(("trusted", "last"), [("", 429), ("127.0.0.1", 401)])
def test_only_trusted_proxies_may_set_the_client_address(
    empty_redis: EmbeddedRedis, tmp_path: Path, trusted: str, last: int
) -> None:
    with api_process(empty_redis.url, tmp_path, TRUSTED_PROXIES=trusted) as address:
        statuses = [
            status_of(
                address, "/status", "Host: x", "X-API-Key: tml-guessed",
                f"X-Forwarded-For: 192.0.2.{number}",
            )
            for number in range(WRONG_KEYS_PER_MINUTE + 1)
        ]  # fmt: skip
        assert statuses == [401] * WRONG_KEYS_PER_MINUTE + [last]
        assert status_of(address, "/api/v1/get_server_capabilities", "Host: x", f"X-API-Key: {ALICE}") == 200


def test_an_api_process_starts_no_math_threads() -> None:
    script = """if True:
        import os, sys
        import cotrain_server.__main__
        assert "numpy" in sys.modules
        print(len(os.listdir("/proc/self/task")))
    """
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_short_key_in_the_settings_stops_the_process_with_a_sentence(
    empty_redis: EmbeddedRedis, tmp_path: Path
) -> None:
    for name, value in (("ADMIN_KEY", "fifteen-letters"), ("API_KEYS", "tml-dev_d3v"), ("PORT", "x")):
        environment = {
            **os.environ, "COTRAIN_REDIS_URL": empty_redis.url, "COTRAIN_DATA_DIR": str(tmp_path),
            f"COTRAIN_{name}": value,
        }  # fmt: skip
        done = run([sys.executable, "-m", "cotrain_server"], env=environment)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert json.loads(line)["event"] == "settings_refused"
        assert f"COTRAIN_{name}" in line
        assert value == "x" or value not in line
