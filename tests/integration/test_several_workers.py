"""Several workers of one base model, and processes that are killed: nothing accepted is lost, nothing is applied twice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from cotrain_store.tenants.history import read_history
from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery.crashes import MAX_CRASHES
from tests.support.bodies import sequences
from tests.support.draws import variant
from tests.support.processes import scheduler_and_worker, settings_of
from tests.support.program import (
    LORA,
    PROGRAM,
    computed,
    numbers_of,
    restored_digest,
    results,
    submit,
    train_undisturbed,
    undisturbed,
)
from tests.support.redis_server import EmbeddedRedis
from tests.support.serving import Serving
from tests.support.stack import Home, accepting, stack, worker
from tests.support.tiny_models import build_tiny
from tests.support.waiting import wait_until
from tests.warm.popen import Popen, run
from tests.warm.sources import COMMAND

TENANTS, STEPS = 8, 3
KEYS = [f"tml-tenant{number}_of-the-lab-{number}" for number in range(TENANTS)]
PATIENCE_S = 300
#: Command that works with and without installed entry points.
JOINING = [
    sys.executable, "-c", "import typer; from cotrain_server.commands.worker import worker; typer.run(worker)",
]  # fmt: skip

Numbers = list[list[tuple[float, float]]]


class Tenants:
    """Runs, each of a different tenant, that train concurrently."""

    def __init__(self, address: str, clients: ExitStack) -> None:
        services = [ServiceClient(base_url=address, api_key=key) for key in KEYS]
        for service in services:
            clients.enter_context(service)
        self.runs = [
            service.create_lora_training_client("tiny", rank=2 + number % 3, seed=number)
            for number, service in enumerate(services)
        ]
        self.numbers: Numbers = []

    def step(self) -> None:
        """Send one step of every run before waiting for any result."""
        self.wait(self.begin())

    def begin(self) -> list[tuple[object, object]]:
        return [begin(run, number) for number, run in enumerate(self.runs)]

    def wait(self, begun: list[tuple[object, object]]) -> None:
        self.numbers.append([told(loss, step) for loss, step in begun])

    def save(self) -> None:
        """Save the weights in folders that are named after their content."""
        for saved in [each.save_state("last") for each in self.runs]:
            saved.result(PATIENCE_S)


def begin(run: TrainingClient, number: int) -> tuple[object, object]:
    tokens = [(number * 7 + at * 3) % 500 for at in range(4 + number % 5)]
    inputs = {"target_tokens": [*tokens[1:], 1], "weights": [1.0] * len(tokens)}
    datum = Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    return run.forward_backward([datum], "cross_entropy"), run.optim_step(AdamParams(learning_rate=1e-2))


def told(loss, step) -> tuple[float, float]:  # type: ignore[no-untyped-def]  # futures of the client
    found = loss.result(PATIENCE_S).metrics["loss:sum"]
    return found, step.result(PATIENCE_S).metrics["grad_norm"]


def saved_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "weights").rglob("*") if path.is_dir()}


def asked(serving: Serving, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request as the operator."""
    headers = {**serving.operator, "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{serving.address}{path}", data, headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read() or "null")


def move(serving: Serving, run: str, worker: str) -> bool:
    """Move a run to a worker. Return False if it is already there."""
    (tenant,) = {
        each["tenant"]
        for cycle in asked(serving, "/status")["pools"][0]["cycles"]
        for each in cycle["runs"]
        if each["run"] == run
    }
    try:
        asked(serving, f"/api/v1/admin/tenants/{tenant}/runs/{run}/move", {"worker": worker})
    except urllib.error.HTTPError as refused:
        if f"is already on worker {worker}" not in refused.read().decode():
            raise
        return False
    return True


def counted(serving: Serving, name: str) -> float:
    """Read one of the pool's counters."""
    return float(asked(serving, "/status")["pools"][0]["counters"].get(name, 0))


def workers_of(serving: Serving) -> dict[str, dict[str, Any]]:
    """Return the heartbeat of each live worker."""
    (pool,) = asked(serving, "/status")["pools"]
    return {worker["id"]: worker for worker in pool["workers"]}


@pytest.fixture(scope="module")
def alone(base_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Numbers, set[str]]:
    """Results of one worker."""
    folder = tmp_path_factory.mktemp("alone")
    with Serving(folder, [base_model], KEYS, ["--device=cpu"]) as serving, ExitStack() as clients:
        tenants = Tenants(serving.address, clients)
        for _ in range(STEPS):
            tenants.step()
        tenants.save()
    return tenants.numbers, saved_in(folder)


def test_four_workers_compute_the_same_as_one_despite_moves_and_a_kill(
    tmp_path: Path, base_model: str, alone: tuple[Numbers, set[str]]
) -> None:
    options = ["--device=cpu", "--workers=4"]
    with Serving(tmp_path, [base_model], KEYS, options) as serving, ExitStack() as clients:
        tenants = Tenants(serving.address, clients)
        tenants.step()
        wait_until(lambda: all(found["runs"] for found in workers_of(serving).values()))
        under_way = tenants.begin()
        moved = [move(serving, run.model_id, "w3") for run in tenants.runs[:4]]
        tenants.wait(under_way)
        wait_until(lambda: counted(serving, "moves") == sum(moved))
        assert sum(moved) > 0
        assert counted(serving, "replayed_ops") == 0
        under_way = tenants.begin()
        os.kill(int(re.findall(r"worker-w2 started \(pid (\d+)\)", serving.log)[-1]), signal.SIGKILL)
        tenants.wait(under_way)
        tenants.save()
        wait_until(lambda: set(workers_of(serving)) == {"w0", "w1", "w2", "w3"})
    assert (tenants.numbers, saved_in(tmp_path)) == alone


@pytest.mark.parametrize("end", [variant(signal.SIGTERM), signal.SIGKILL])
def test_remote_workers_join_and_their_runs_continue_when_they_leave(
    tmp_path: Path, base_model: str, alone: tuple[Numbers, set[str]], end: signal.Signals
) -> None:
    with EmbeddedRedis() as redis, ExitStack() as at_end:
        options = ["--device=cpu", f"--redis-url={redis.url}"]
        settings = {"COTRAIN_REASSIGN_AFTER_S": "1"}
        serving = at_end.enter_context(Serving(tmp_path, [base_model], KEYS, options, settings))
        joined = Popen(
            [
                *JOINING, f"--base-model={base_model}", f"--redis-url={redis.url}",
                f"--data-dir={tmp_path}", "--device=cpu", "--torch-threads=1", "--workers=2",
                "--name=east",
            ],
            start_new_session=True,
        )  # fmt: skip
        at_end.callback(joined.kill)
        wait_until(lambda: set(workers_of(serving)) == {"w0", "east-w0", "east-w1"})
        tenants = Tenants(serving.address, at_end)
        tenants.step()
        wait_until(lambda: all(found["runs"] for found in workers_of(serving).values()))
        under_way = tenants.begin()
        joined.send_signal(end)
        tenants.wait(under_way)
        assert joined.wait(PATIENCE_S) == (0 if end is signal.SIGTERM else -end)
        tenants.step()
        tenants.save()
        wait_until(lambda: workers_of(serving)["w0"]["runs"] == TENANTS)
        left = workers_of(serving)
    assert (tenants.numbers, saved_in(tmp_path)) == alone
    assert set(left) == {"w0"}
    if end is signal.SIGTERM:
        assert left["w0"]["restored_ops"] == 0


def test_a_folder_of_no_server_is_rejected(tmp_path: Path) -> None:
    refused = run([*JOINING, "--base-model=a/b", "--redis-url=redis://none", f"--data-dir={tmp_path}"])
    assert refused.returncode == os.EX_USAGE
    assert "is no server's data folder: it has no file belongs-to." in refused.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--gpus=all", "--device=cpu"], "exclude each other: there is one worker per GPU"),
        (["--gpus=0"], "no GPU can be seen here"),
        (["--gpus=0", "--workers=2"], "--gpus 0 and --workers 2 exclude each other"),
    ],
)
def test_invalid_workers_are_rejected_in_a_sentence(tmp_path: Path, options: list[str], why: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(COMMAND), "serve", "--base-model=a/b", f"--data-dir={tmp_path}", *options]
    refused = run(command, env=environment)
    assert refused.returncode == os.EX_USAGE
    assert why in refused.stderr


POISON = {"error": "Request repeatedly crashed the worker; it was not applied.", "category": "server"}


async def test_killed_processes_change_no_number(tmp_path: Path) -> None:
    """The model is a hybrid with experts, and both optimizers train."""
    torch.set_num_threads(1)
    model = build_tiny("qwen3_next", tmp_path / "tiny", vocab=512)
    engine, loras = Engine.load(str(model)), (LORA, replace(LORA, optimizer="muon"))
    with EmbeddedRedis() as redis_server:
        url, folder = redis_server.url, tmp_path / "alone"
        async with stack(url, folder) as alone:
            expected = [await train_undisturbed(alone, engine, lora=lora) for lora in loras]
        redis_server.flush()

        settings = settings_of(url, tmp_path, model)
        with scheduler_and_worker(settings, tmp_path) as (scheduler, trainer):
            async with accepting(url, tmp_path) as server:
                runs = [await server.create(lora.optimizer, lora.optimizer, lora) for lora in loras]
                answers: list[list[Any]] = [[] for _ in runs]
                for first, last, victims in (
                    (1, 5, [trainer]),
                    (6, 9, [scheduler]),
                    (10, len(PROGRAM), [trainer, scheduler]),
                ):
                    requests = [await submit(server, run, first, last) for run in runs]
                    for run, own, asked in zip(runs, answers, requests, strict=True):
                        own += await results(server, run, asked[:1])
                    for process in victims:
                        await asyncio.to_thread(process.kill)
                    for process in victims:
                        process.start()
                    for run, own, asked in zip(runs, answers, requests, strict=True):
                        own += await results(server, run, asked[1:])
                for run, own in zip(runs, answers, strict=True):
                    assert numbers_of(await read_history(server.connection, run.id)) == computed(own)
            assert answers == [undisturbed for undisturbed, _ in expected]
            await asyncio.to_thread(trainer.stop)
            await asyncio.to_thread(scheduler.stop)
        for run, (_, digest) in zip(runs, expected, strict=True):
            assert await asyncio.to_thread(restored_digest, Home(url, tmp_path), engine, run.id) == digest


async def test_a_request_that_kills_its_worker_again_and_again_is_found_and_left_out(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """Its neighbour in the step ends as if alone, and its own run as if it had never been."""
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path / "alone") as alone:
            expected, digest = await undisturbed(alone, engine, last=3)
            with worker(alone, engine):
                without = await alone.create("without", "without", LORA)
                await results(alone, without, await submit(alone, without, 3, 4, place=1))
        redis_server.flush()

        poison = "a:train:0:1"
        kills = f"worker.before_run~{poison}=kill@*,worker.before_risk~{poison}=kill@*"
        settings = settings_of(url, tmp_path, tiny_model) | {"COTRAIN_FAILPOINTS": kills}
        async with accepting(url, tmp_path) as server:
            guilty, neighbour = [await server.create(name, name, LORA) for name in ("a", "b")]
            requests = await submit(server, guilty, 1, 1)
            others = await submit(server, neighbour, 1, 3)
            with scheduler_and_worker(settings, tmp_path) as (scheduler, trainer):
                # As planned, twice; its run's part of the step, once; alone, twice.
                for _ in range(2 + 1 + MAX_CRASHES):
                    await asyncio.to_thread(trainer.await_kill)
                    trainer.start()
                assert await results(server, guilty, requests) == [POISON]
                assert await results(server, neighbour, others) == expected
                await results(server, guilty, await submit(server, guilty, 3, 4, place=2))
                await asyncio.to_thread(trainer.stop)
                await asyncio.to_thread(scheduler.stop)
        mine = await asyncio.to_thread(restored_digest, Home(url, tmp_path), engine, guilty.id)
        assert mine == engine.adapters.state(without.id).digest()
        assert await asyncio.to_thread(restored_digest, Home(url, tmp_path), engine, neighbour.id) == digest


async def test_a_pass_too_large_for_memory_costs_its_neighbours_one_more_kill_at_most(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """The kernel kills at the largest micro-batch. What others sent is done before that pass runs again, alone."""
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path / "alone") as alone:
            expected, digest = await undisturbed(alone, engine, last=4)
        redis_server.flush()

        kills = "worker.before_large_pass~a:train:0:1=kill@*"
        settings = settings_of(url, tmp_path, tiny_model) | {"COTRAIN_FAILPOINTS": kills}
        async with accepting(url, tmp_path) as server:
            guilty, neighbour = [await server.create(name, name, LORA) for name in ("a", "b")]
            requests = [await server.forward_backward(guilty, 1, sequences(1, 1, 400))]
            requests += await submit(server, guilty, 3, 4, place=2)
            others = await submit(server, neighbour, 1, 4)
            with scheduler_and_worker(settings, tmp_path) as (scheduler, trainer):
                await asyncio.to_thread(trainer.await_kill)
                trainer.start()
                await asyncio.to_thread(trainer.await_kill)
                assert await results(server, neighbour, others) == expected  # no process lives
                trainer.start()
                too_large, *after = await results(server, guilty, requests)
                assert too_large["category"] == "user"
                assert re.fullmatch(
                    r"Request needs more memory than the worker has: its process was killed twice while it ran a "
                    r"datum of 400 tokens, within a memory limit of \d+\.\d GB\. Send shorter datums, .*",
                    too_large["error"],
                )
                assert all("error" not in answer for answer in after if isinstance(answer, dict))
                await asyncio.to_thread(trainer.stop)
                await asyncio.to_thread(scheduler.stop)
        assert await asyncio.to_thread(restored_digest, Home(url, tmp_path), engine, neighbour.id) == digest
