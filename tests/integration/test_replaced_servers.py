"""Servers that are replaced: by a copy elsewhere with the same numbers, or by another API process behind the same port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from cotrain import AdamParams, Datum, Future, ModelInput, ServiceClient, TrainingClient
from cotrain.types import ForwardBackwardOutput, OptimStepResponse
from cotrain_store import redis_keys
from cotrain_store.redis_client.connection import SyncConnection
from tests.support.http_api import ALICE, publish_pool, running_api
from tests.support.plain_http import NO_TLS
from tests.support.ports import free_port
from tests.support.processes import PATIENCE_S
from tests.support.redis_server import EmbeddedRedis
from tests.support.serving import Serving
from tests.support.waiting import until
from tests.warm.popen import Popen
from tests.warm.sources import SOURCES

Sent = tuple[Future[ForwardBackwardOutput], Future[OptimStepResponse]]

KEY = "tml-restored_key-of-sixteen-letters"
#: Datums of a body that is too long for Redis (16 KB) and lies in the spool.
MANY = 8

ADAM = AdamParams(learning_rate=1e-2)

#: Loss and gradient norm of one step.
Numbers = tuple[float, float]


def datums(index: int) -> list[Datum]:
    """Make the batch of a step; every other one is large."""
    return [datum(index * 7 + number) for number in range(MANY if index % 2 else 1)]


def datum(first: int) -> Datum:
    tokens = [(first + place) % 97 for place in range(300)]
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def send(run: TrainingClient, index: int) -> Sent:
    return run.forward_backward(datums(index), "cross_entropy"), run.optim_step(ADAM)


def wait(sent: Sent) -> Numbers:
    passed, stepped = sent
    metrics = stepped.result(PATIENCE_S).metrics or {}
    return passed.result(PATIENCE_S).metrics["loss:sum"], metrics["grad_norm"]


def train(run: TrainingClient, indices: Sequence[int]) -> list[Numbers]:
    return [wait(sent) for sent in [send(run, index) for index in indices]]


def copied(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "--archive", source, target], check=True)
    return target


def test_a_copy_of_a_paused_and_of_a_stopped_server_goes_on_with_the_same_numbers(
    tmp_path: Path, base_model: str
) -> None:
    port = [f"--port={free_port()}"]
    first, of_paused, of_stopped = (tmp_path / name for name in ("first", "paused", "stopped"))
    with Serving(first, [base_model], [KEY], port) as serving:
        service = ServiceClient(serving.address, KEY)
        run = service.create_lora_training_client("tiny", rank=4, seed=3)
        seen = train(run, range(3))
        path = run.save_state("kept").result(PATIENCE_S).path
        sent = [send(run, index) for index in range(3, 8)]
        seen.append(wait(sent[0]))
        with paused(serving):
            copied(first, of_paused)
        seen += [wait(each) for each in sent[1:]]
        assert serving.stop() == 0
    copied(first, of_stopped)
    shutil.rmtree(first)
    with Serving(of_stopped, [base_model], [KEY], port), service:
        # The same program, and its next steps.
        undisturbed = train(service.create_lora_training_client("tiny", rank=4, seed=3), range(10))
        assert seen + train(run, range(8, 10)) == undisturbed
    with Serving(of_paused, [base_model], [KEY]) as serving, ServiceClient(serving.address, KEY) as other:
        again = other.create_training_client_from_state_with_optimizer(path)
        assert train(again, range(3, 8)) == undisturbed[3:8]


@contextlib.contextmanager
def paused(serving: Serving) -> Iterator[None]:
    """Hold every process of a server, as `docker compose pause` does."""
    pids = [int(pid) for pid in re.findall(r"started \(pid (\d+)\)", serving.log)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


POLLS = 40
CLIENTS = 4
#: Requests answered by the successor alone, before the load ends.
AFTERWARDS = 40


async def test_what_a_draining_process_answers_asks_for_another_connection(empty_redis: EmbeddedRedis) -> None:
    async with running_api(empty_redis.url) as api:
        assert "connection" not in (await api.post("create_session", {})).headers
        api.services.drain()
        answer = await api.post("create_session", {})
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")


async def test_a_rolling_restart_fails_no_request(
    empty_redis: EmbeddedRedis, tmp_path: Path, redis: SyncConnection
) -> None:
    publish_pool(empty_redis.url, tmp_path)
    statuses = Counter[int]()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with _api(empty_redis.url, tmp_path, listener) as first:
            await _listening(redis, 1)
            run = await _new_run(url)
            load = [asyncio.create_task(_poll(url, run, statuses)) for _ in range(POLLS)]
            load += [asyncio.create_task(_open_sessions(url, statuses)) for _ in range(CLIENTS)]
            await _count(statuses, 200, CLIENTS)
            with _api(empty_redis.url, tmp_path, listener):
                await _listening(redis, 2)
                first.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(first.wait, PATIENCE_S) == 0
                await _count(statuses, 200, statuses[200] + AFTERWARDS)
                for task in load:
                    task.cancel()
                outcomes = await asyncio.gather(*load, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
    assert set(statuses) == {200, 408}
    assert statuses[408] >= POLLS


@contextlib.contextmanager
def _api(redis_url: str, folder: Path, listener: socket.socket) -> Iterator[Popen]:
    """Run an API process that listens on a socket of ours, as under `cotrain serve`."""
    settings = {
        "COTRAIN_REDIS_URL": redis_url,
        "COTRAIN_DATA_DIR": str(folder),
        "COTRAIN_DISK_RESERVE_BYTES": "0",
        "COTRAIN_API_KEYS": ALICE,
        "PYTHONPATH": os.pathsep.join(SOURCES),
    }
    descriptor = str(listener.fileno())
    with (folder / "api.log").open("ab") as log:
        process = Popen(
            [sys.executable, "-m", "cotrain_server", "--listen-fd", descriptor, "--long-poll-s", "40"],
            env={**os.environ, **settings},
            stdout=log, stderr=log, pass_fds=(listener.fileno(),),
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


async def _new_run(url: str) -> str:
    async with httpx.AsyncClient(
        base_url=f"{url}/api/v1", headers={"X-API-Key": ALICE}, timeout=PATIENCE_S, verify=NO_TLS
    ) as client:
        session = (await client.post("/create_session", json={})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/model"}
        answer = await client.post("/create_model", json={**body, "lora_config": {"rank": 4}})
        run: str = answer.json()["request_id"]
        return run


async def _poll(url: str, request: str, statuses: Counter[int]) -> None:
    await _repeat(url, "/retrieve_future", {"request_id": request}, statuses)


async def _open_sessions(url: str, statuses: Counter[int]) -> None:
    await _repeat(url, "/create_session", {}, statuses)


async def _repeat(url: str, path: str, body: dict[str, str], statuses: Counter[int]) -> None:
    """Ask again and again on a kept connection; a broken one is a failure."""
    async with httpx.AsyncClient(
        base_url=f"{url}/api/v1", headers={"X-API-Key": ALICE}, timeout=PATIENCE_S, verify=NO_TLS
    ) as client:
        while True:
            statuses[(await client.post(path, json=body)).status_code] += 1
            await asyncio.sleep(0.01)


async def _listening(redis: SyncConnection, processes: int) -> None:
    channel = redis_keys.notify_results()
    await until(lambda: redis.pubsub_numsub(channel)[0][1] >= processes)


async def _count(statuses: Counter[int], status: int, at_least: int) -> None:
    await until(lambda: statuses[status] >= at_least)
