"""Workers that restore runs from their logs: observed from outside, killed, stopped."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool, new_writer
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import RunRecord
from cotrain_store.monitoring.fleet import pool_status
from cotrain_store.redis_client.connection import SyncConnection, open_connection
from cotrain_store.results.futures import Futures, Pending
from cotrain_store.tenants.policies import PauseRecords
from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery.recovery_copies import ReplayCost
from tests.support.processes import Process, settings_of, stack_of
from tests.support.program import LORA, results, submit
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, policy_was_read, worker
from tests.support.waiting import until, until_true

NAMES = ("a", "b", "c")
OPS = 8
TENANT = TenantId("a")


class Host:
    """Three runs with a log and no snapshot, whose worker was killed; their next requests wait for
    a new one."""

    def __init__(self, server: Stack, runs: list[RunRecord], folder: Path, worker: Process, scheduler: Process) -> None:
        self.server, self.runs, self.worker = server, runs, worker
        self._scheduler = scheduler
        self._log = folder / "worker.log"

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [line for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @property
    def replayed(self) -> dict[str, list[int]]:
        """Return the number of replayed ops of each run, for each process that restored it."""
        found: dict[str, list[int]] = {}
        for event in self.events("run_restored"):
            found.setdefault(event["run"], []).append(event["replayed"])
        return found

    async def go_on(self) -> list[Any]:
        """Send the next request of each run, for one step, and return the results."""
        self._scheduler.send(signal.SIGSTOP)
        sent = [await submit(self.server, run, OPS + 1, OPS + 1) for run in self.runs]
        self._scheduler.send(signal.SIGCONT)
        return [
            answer
            for run, requests in zip(self.runs, sent, strict=True)
            for answer in await results(self.server, run, requests)
        ]


@asynccontextmanager
async def killed_worker(
    redis_url: str, folder: Path, model: Path, failpoints: str, **settings: str
) -> AsyncIterator[Host]:
    """Train three runs concurrently and kill their worker; the next one runs with the failpoints."""
    environment = settings_of(redis_url, folder, model) | settings
    shared = {name: environment[name] for name in ("COTRAIN_REDIS_URL", "COTRAIN_DATA_DIR")}
    connection, spool = open_connection(redis_url), Spool(folder / "spool", new_writer("api"))
    async with Futures(connection, spool) as futures:
        server = stack_of(connection, spool, futures)
        runs = [await server.create(name, name, LORA) for name in NAMES]
        sent = [await submit(server, run, 1, OPS) for run in runs]
        log = folder / "worker.log"
        with Process("cotrain_scheduler", shared, folder / "scheduler.log") as scheduler:
            with Process("cotrain_workers", environment, log) as first:
                for run, requests in zip(runs, sent, strict=True):
                    await results(server, run, requests)
                await asyncio.to_thread(first.kill)
            environment |= {"COTRAIN_FAILPOINTS": failpoints, "COTRAIN_FAILPOINTS_LOG": str(folder / "reached")}
            with Process("cotrain_workers", environment, log) as second:
                yield Host(server, runs, folder, second, scheduler)
    spool.close()
    await connection.aclose()


async def test_two_kills_during_restores_lose_no_restored_run(
    empty_redis: EmbeddedRedis, redis: SyncConnection, tmp_path: Path, tiny_model: Path
) -> None:
    """Kill as soon as one more snapshot is registered: the next process replays one run less."""
    kills = "snapshot.registered=kill@1,snapshot.registered=kill@2"
    async with killed_worker(empty_redis.url, tmp_path, tiny_model, kills) as host:
        answers = asyncio.create_task(host.go_on())
        copies, before = list[bytes](), 0
        for restored in (1, 2):
            await asyncio.to_thread(host.worker.await_kill)
            copies = [redis.hget(redis_keys.log(POOL, run.id), "snap") for run in host.runs]
            assert sorted(copies) == [b"-1"] * (len(NAMES) - restored) + [b"8"] * restored
            before = len(host.events("run_restored"))
            host.worker.start()
        assert len(await answers) == len(NAMES)
        await asyncio.to_thread(host.worker.stop)
        # A run with a copy that committed its request before the kill is not restored again.
        expected = {run.id: 7 * (copy == b"-1") for run, copy in zip(host.runs, copies, strict=True)}
        last = {event["run"]: event["replayed"] for event in host.events("run_restored")[before:]}
        assert 7 in last.values()
        assert last.items() <= expected.items()
        assert host.events("step_crash_loop") == []
        assert not redis.exists(redis_keys.starts(POOL), redis_keys.crash_counts(POOL))


async def test_a_worker_stopped_during_a_restore_has_not_crashed(
    empty_redis: EmbeddedRedis, redis: SyncConnection, tmp_path: Path, tiny_model: Path
) -> None:
    """Send SIGTERM after one of three runs is restored: the worker exits with status 0, and no
    crash is counted."""
    async with killed_worker(empty_redis.url, tmp_path, tiny_model, "worker.replayed=stop@1") as host:
        answers = asyncio.create_task(host.go_on())
        await until(lambda: host.worker.is_stopped)
        host.worker.send(signal.SIGTERM)
        host.worker.send(signal.SIGCONT)
        await asyncio.to_thread(host.worker.await_end)
        assert [event["progress"] for event in host.events("restore_stopped")] == ["1 of 3 runs, 9 of 27 ops"]
        assert all(int(count) <= 0 for count in redis.hvals(redis_keys.starts(POOL)))
        assert not redis.exists(redis_keys.crash_counts(POOL))
        host.worker.start()
        assert len(await answers) == len(NAMES)
        await asyncio.to_thread(host.worker.stop)
        assert sorted(times[-1] for times in host.replayed.values()) == [0, 7, 7]
        assert not redis.exists(redis_keys.starts(POOL))


async def test_many_small_passes_trigger_a_snapshot_before_replay_is_too_slow(
    server: Stack, redis: SyncConnection, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine
) -> None:
    """A pass costs 10 s, and each run has two: no single run is near the limit of 30 s, but all
    together exceed it."""
    runs = [await server.create(name, name, LORA) for name in NAMES]
    sent = [await submit(server, run, 1, 4) for run in runs]
    with worker(empty_redis.url, tmp_path, engine, drains=False, cost=ReplayCost(pass_s=10.0)):
        for run, requests in zip(runs, sent, strict=True):
            await results(server, run, requests)

        def copied() -> list[bytes | None]:
            return [redis.hget(redis_keys.log(POOL, run.id), "snap") for run in runs]

        await until(lambda: copied().count(b"4") >= 2)


async def test_the_progress_of_a_restore_is_visible(
    server: Stack,
    empty_redis: EmbeddedRedis,
    tmp_path: Path,
    engine: Engine,
    heartbeats_are_quick: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [await server.create(TENANT, name, LORA) for name in NAMES]
    sent = [await submit(server, run, 1, OPS) for run in runs]
    with worker(empty_redis.url, tmp_path, engine, drains=False):
        for run, requests in zip(runs, sent, strict=True):
            await results(server, run, requests)
    pauses = PauseRecords(server.dispatch._redis)
    await pauses.pause_tenant(TENANT, "")
    await policy_was_read(server, monkeypatch)
    last = [await submit(server, run, OPS + 1, OPS + 1) for run in runs]
    await pauses.resume_tenant(TENANT)  # all of them are planned in one step
    goes_on = threading.Event()

    def wait(name: str, *_: object) -> None:
        assert name != "worker.replayed" or goes_on.wait(60)

    monkeypatch.setattr("cotrain_workers.recovery.run_lifecycle.failpoint", wait)
    connection = open_connection(empty_redis.url)

    async def shows(progress: dict[str, int] | None) -> bool:
        found = (await pool_status(connection, POOL)).workers
        return [each.restoring for each in found] == [progress]

    with worker(empty_redis.url, tmp_path, engine):
        first = {"runs_done": 1, "runs": 3, "ops_done": 9, "ops": 27}
        await until_true(lambda: shows(first))
        waits = await server.futures.wait(runs[2].tenant, last[2][0], 0.01)
        assert isinstance(waits, Pending)
        assert "worker is restoring: 1 of 3 runs, 9 of 27 ops; position 1" in (waits.reason or "")
        goes_on.set()
        for run, requests in zip(runs, last, strict=True):
            await results(server, run, requests)
        await until_true(lambda: shows(None))
    await connection.aclose()
