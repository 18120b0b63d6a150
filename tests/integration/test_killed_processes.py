"""The real processes, killed for real: nothing accepted is lost, nothing is applied twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from cotrain_store.connection import open_connection
from cotrain_store.dispatch import Dispatch
from cotrain_store.futures import Futures
from cotrain_store.intake import Intake, TenantLimits
from cotrain_store.records import Records
from cotrain_store.sample_intake import SampleIntake, SampleLimits
from cotrain_store.spool import Spool, new_writer
from tests.support.program import LORA, PROGRAM, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.sampling import LONG, sample, sampled, saved_sampler, submit_sample
from tests.support.stack import MODEL, Stack, stack, worker

if TYPE_CHECKING:
    from cotrain_store.connection import Connection
    from cotrain_workers.engine import Engine

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / folder) for folder in ("client", "scheduler", "server", "workers")]
PATIENCE_S = 60


class Process:
    """One of our processes; `kill` is SIGKILL, `start` starts it (again). None outlives its block."""

    def __init__(self, module: str, settings: dict[str, str], log: Path) -> None:
        self._command = [sys.executable, "-m", module]
        self._environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(SOURCES)}
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        self._process.kill()
        assert self._process.wait(PATIENCE_S) == -signal.SIGKILL, self._log.read_text()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE_S) == 0, self._log.read_text()


def settings_of(url: str, data_dir: Path, model: Path) -> dict[str, str]:
    return {
        "COTRAIN_REDIS_URL": url,
        "COTRAIN_DATA_DIR": str(data_dir),
        "COTRAIN_BASE_MODEL": f"{MODEL}={model}",
        "COTRAIN_TORCH_THREADS": "1",
        "COTRAIN_OFFLINE": "true",
        "COTRAIN_SNAPSHOT_DEBT_OPS": "4",
        "OMP_NUM_THREADS": "1",
    }


def stack_of(connection: Connection, spool: Spool, futures: Futures) -> Stack:
    return Stack(
        Intake(connection, spool, TenantLimits()),
        futures,
        Dispatch(connection, "nobody"),
        Records(connection),
        SampleIntake(connection, spool, SampleLimits()),
    )


async def test_killed_processes_change_no_number(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path / "alone") as alone:
            expected, digest = await undisturbed(alone, url, tmp_path / "alone", engine)
        redis_server.flush()

        settings = settings_of(url, tmp_path, tiny_model)
        shared = {name: settings[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
        connection, spool = open_connection(url), Spool(tmp_path / "spool", new_writer("api"))
        with (
            Process("cotrain_scheduler", shared, tmp_path / "scheduler.log") as scheduler,
            Process("cotrain_workers", settings, tmp_path / "worker.log") as trainer,
        ):
            async with Futures(connection, spool) as futures:
                server = stack_of(connection, spool, futures)
                run = await server.create("a", "a", LORA)
                answers = []
                for first, last, victims in (
                    (1, 5, [trainer]),
                    (6, 9, [scheduler]),
                    (10, len(PROGRAM), [trainer, scheduler]),
                ):
                    requests = await submit(server, run, first, last)
                    answers += await results(server, run, requests[:1])
                    for process in victims:
                        await asyncio.to_thread(process.kill)
                    for process in victims:
                        process.start()
                    answers += await results(server, run, requests[1:])
            assert answers == expected
            await asyncio.to_thread(trainer.stop)
            await asyncio.to_thread(scheduler.stop)
        spool.close()
        await connection.aclose()
        assert await asyncio.to_thread(restored_digest, url, tmp_path, engine, run.id) == digest


async def test_a_killed_worker_loses_no_saved_weights_and_no_sample(
    tmp_path: Path, engine: Engine, tiny_model: Path
) -> None:
    """Killed once the save is answered, durable or not, and once more in the middle of generating."""
    seeds = range(12)
    with EmbeddedRedis() as redis_server:
        url = redis_server.url
        async with stack(url, tmp_path / "alone") as alone:
            with worker(url, tmp_path / "alone", engine):
                run = await alone.create("a", "a", LORA)
                await submit(alone, run, 1, 4)
                sampler = await saved_sampler(alone, run, 5)
                expected = [await sample(alone, sampler, seed, LONG, seed=seed) for seed in seeds]
        redis_server.flush()

        settings = settings_of(url, tmp_path, tiny_model)
        shared = {name: settings[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
        connection, spool = open_connection(url), Spool(tmp_path / "spool", new_writer("api"))
        with (
            Process("cotrain_scheduler", shared, tmp_path / "scheduler.log"),
            Process("cotrain_workers", settings, tmp_path / "worker.log") as victim,
        ):
            async with Futures(connection, spool) as futures:
                server = stack_of(connection, spool, futures)
                run = await server.create("a", "a", LORA)
                await submit(server, run, 1, 4)
                sampler = await saved_sampler(server, run, 5)
                await asyncio.to_thread(victim.kill)
                requests = [
                    await submit_sample(server, sampler, seed, LONG, seed=seed) for seed in seeds
                ]
                victim.start()
                answers = [await sampled(server, sampler, requests[0])]
                await asyncio.to_thread(victim.kill)
                victim.start()
                answers += [await sampled(server, sampler, request) for request in requests[1:]]
            assert answers == expected
            await asyncio.to_thread(victim.stop)
        spool.close()
        await connection.aclose()
