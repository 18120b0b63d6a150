"""The real processes, killed for real: nothing accepted is lost, nothing is applied twice."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.redis_client.connection import open_connection
from cotrain_store.results.futures import Futures
from cotrain_store.tenants.history import read_history
from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery.crashes import MAX_CRASHES
from tests.support.bodies import sequences
from tests.support.processes import WORKER, Process, settings_of, stack_of
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
from tests.support.stack import stack, worker
from tests.support.tiny_models import build_tiny

POISON = {"error": "Request repeatedly crashed the worker; it was not applied.", "category": "server"}


async def test_killed_processes_change_no_number(tmp_path: Path) -> None:
    """The model is a hybrid with experts, and both optimizers train."""
    torch.set_num_threads(1)
    model = build_tiny("qwen3_next", tmp_path / "tiny", vocab=512)
    engine, loras = Engine.load(str(model)), (LORA, replace(LORA, optimizer="muon"))
    with EmbeddedRedis() as redis_server:
        url, folder = redis_server.url, tmp_path / "alone"
        async with stack(url, folder) as alone:
            expected = [await train_undisturbed(alone, url, folder, engine, lora=lora) for lora in loras]
        redis_server.flush()

        settings = settings_of(url, tmp_path, model)
        shared = {name: settings[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
        connection, spool = open_connection(url), Spool(tmp_path / "spool", new_writer("api"))
        with (
            Process("cotrain_scheduler", shared, tmp_path / "scheduler.log") as scheduler,
            Process(WORKER, settings, tmp_path / "worker.log") as trainer,
        ):
            async with Futures(connection, spool) as futures:
                server = stack_of(connection, spool, futures)
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
            assert answers == [undisturbed for undisturbed, _ in expected]
            for run, own in zip(runs, answers, strict=True):
                assert numbers_of(await read_history(connection, run.id)) == computed(own)
            await asyncio.to_thread(trainer.stop)
            await asyncio.to_thread(scheduler.stop)
        spool.close()
        await connection.aclose()
        for run, (_, digest) in zip(runs, expected, strict=True):
            assert await asyncio.to_thread(restored_digest, url, tmp_path, engine, run.id) == digest


async def test_a_request_that_kills_its_worker_again_and_again_is_found_and_left_out(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """Its neighbour in the step ends as if alone, and its own run as if it had never been."""
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path / "alone") as alone:
            expected, digest = await undisturbed(alone, url, tmp_path / "alone", engine, last=3)
            with worker(url, tmp_path / "alone", engine):
                without = await alone.create("without", "without", LORA)
                await results(alone, without, await submit(alone, without, 3, 4, place=1))
        redis_server.flush()

        poison = "a:train:0:1"
        kills = f"worker.before_run~{poison}=kill@*,worker.before_risk~{poison}=kill@*"
        settings = settings_of(url, tmp_path, tiny_model) | {"COTRAIN_FAILPOINTS": kills}
        shared = {name: settings[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
        connection, spool = open_connection(url), Spool(tmp_path / "spool", new_writer("api"))
        async with Futures(connection, spool) as futures:
            server = stack_of(connection, spool, futures)
            guilty, neighbour = [await server.create(name, name, LORA) for name in ("a", "b")]
            requests = await submit(server, guilty, 1, 1)
            others = await submit(server, neighbour, 1, 3)
            with (
                Process("cotrain_scheduler", shared, tmp_path / "scheduler.log") as scheduler,
                Process(WORKER, settings, tmp_path / "worker.log") as trainer,
            ):
                # As planned, twice; its run's part of the step, once; alone, twice.
                for _ in range(2 + 1 + MAX_CRASHES):
                    await asyncio.to_thread(trainer.await_kill)
                    trainer.start()
                assert await results(server, guilty, requests) == [POISON]
                assert await results(server, neighbour, others) == expected
                await results(server, guilty, await submit(server, guilty, 3, 4, place=2))
                await asyncio.to_thread(trainer.stop)
                await asyncio.to_thread(scheduler.stop)
        spool.close()
        await connection.aclose()
        mine = await asyncio.to_thread(restored_digest, url, tmp_path, engine, guilty.id)
        assert mine == engine.adapters.state(without.id).digest()
        assert await asyncio.to_thread(restored_digest, url, tmp_path, engine, neighbour.id) == digest


async def test_a_pass_too_large_for_memory_costs_its_neighbours_one_more_kill_at_most(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """The kernel kills at the largest micro-batch. What others sent is done before that pass runs again, alone."""
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path / "alone") as alone:
            expected, digest = await undisturbed(alone, url, tmp_path / "alone", engine, last=4)
        redis_server.flush()

        kills = "worker.before_large_pass~a:train:0:1=kill@*"
        settings = settings_of(url, tmp_path, tiny_model) | {"COTRAIN_FAILPOINTS": kills}
        shared = {name: settings[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
        connection, spool = open_connection(url), Spool(tmp_path / "spool", new_writer("api"))
        async with Futures(connection, spool) as futures:
            server = stack_of(connection, spool, futures)
            guilty, neighbour = [await server.create(name, name, LORA) for name in ("a", "b")]
            requests = [await server.forward_backward(guilty, 1, sequences(1, 1, 400))]
            requests += await submit(server, guilty, 3, 4, place=2)
            others = await submit(server, neighbour, 1, 4)
            with (
                Process("cotrain_scheduler", shared, tmp_path / "scheduler.log") as scheduler,
                Process(WORKER, settings, tmp_path / "worker.log") as trainer,
            ):
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
        spool.close()
        await connection.aclose()
        assert await asyncio.to_thread(restored_digest, url, tmp_path, engine, neighbour.id) == digest
