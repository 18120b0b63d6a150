"""Workers that restore runs from their logs: observed from outside, killed, stopped; a run beyond repair stops alone."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cotrain.wire.proto import wire_pb2
from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool, SpoolRef, new_writer
from cotrain_store.disk.stored_results import RUN_STOPPED
from cotrain_store.messages.ids import TenantId, request_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import RunRecord, RunState
from cotrain_store.monitoring.fleet import pool_status
from cotrain_store.redis_client.connection import SyncConnection, open_connection
from cotrain_store.results.pending import Pending
from cotrain_store.tenants.policies import PauseRecords
from cotrain_workers.engine.engine import Engine
from cotrain_workers.recovery.recovery_copies import ReplayCost
from tests.support.bodies import sequences
from tests.support.draws import variant
from tests.support.full_table import no_descriptor
from tests.support.processes import Process, settings_of
from tests.support.program import LORA, killed_after, results, snapshot_files, submit, undisturbed, without_cycle
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, accepting, policy_was_read, worker
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
    async with accepting(redis_url, folder) as server:
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
    server: Stack, redis: SyncConnection, engine: Engine
) -> None:
    """A pass costs 10 s, and each run has two: no single run is near the limit of 30 s, but all
    together exceed it."""
    runs = [await server.create(name, name, LORA) for name in NAMES]
    sent = [await submit(server, run, 1, 4) for run in runs]
    with worker(server, engine, drains=False, cost=ReplayCost(pass_s=10.0)):
        for run, requests in zip(runs, sent, strict=True):
            await results(server, run, requests)

        def copied() -> list[bytes | None]:
            return [redis.hget(redis_keys.log(POOL, run.id), "snap") for run in runs]

        await until(lambda: copied().count(b"4") >= 2)


async def test_the_progress_of_a_restore_is_visible(
    server: Stack,
    empty_redis: EmbeddedRedis,
    engine: Engine,
    heartbeats_are_quick: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [await server.create(TENANT, name, LORA) for name in NAMES]
    sent = [await submit(server, run, 1, OPS) for run in runs]
    with worker(server, engine, drains=False):
        for run, requests in zip(runs, sent, strict=True):
            await results(server, run, requests)
    pauses = PauseRecords(server.connection)
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

    with worker(server, engine):
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


#: Its body is too large for Redis.
LARGE = sequences(0, 12, 500)


async def two_runs(server: Stack, engine: Engine, last: int) -> Any:
    """Train a run and its neighbour up to seq `last`, and leave both to their snapshots."""
    runs = [await server.create(name, name, LORA) for name in ("a", "b")]
    with worker(server, engine):
        for run in runs:
            await results(server, run, await submit(server, run, 1, last))
    return runs


async def assert_stopped_alone(
    server: Stack, engine: Engine, broken: RunRecord, neighbour: RunRecord, first: int = 3
) -> None:
    """Submit two more requests to both; the broken run fails, its neighbour ends as if alone."""
    requests = await submit(server, broken, first, first + 1)
    others = await submit(server, neighbour, first, first + 1)
    with worker(server, engine):
        for request in requests:
            assert await server.result(broken, request) == RUN_STOPPED
        answers = await results(server, neighbour, others)
    record = await server.futures._records.run(broken.tenant, broken.id)
    assert record.state is RunState.FAILED
    expected, digest = await undisturbed(server, engine, last=first + 1)
    assert answers == expected[first - 1 :]
    assert engine.adapters.state(neighbour.id).digest() == digest


async def test_a_run_without_a_readable_snapshot_or_checkpoint_stops_alone(
    server: Stack, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    broken, neighbour = await two_runs(server, engine, last=2)
    with worker(server, engine):
        for run in (broken, neighbour):
            await results(server, run, await submit(server, run, 3, 3))
    copies = snapshot_files(redis, broken, tmp_path)
    assert len(copies) == 2
    for copy in copies:
        copy.unlink()
    await assert_stopped_alone(server, engine, broken, neighbour, first=4)


async def test_a_missing_body_stops_its_run_alone(server: Stack, engine: Engine, redis: Any) -> None:
    broken, neighbour = await two_runs(server, engine, last=2)
    await submit(server, broken, 3, 3)
    redis.hdel(redis_keys.bodies(POOL, broken.id), 3)
    await assert_stopped_alone(server, engine, broken, neighbour)


def tampered(packed: bytes, how: str) -> bytes:
    result = Result.decode(packed)
    if how == "a norm":
        return Result.of_json({"metrics": {"grad_norm": 1.0}}).encode()
    output = wire_pb2.ForwardBackwardOutput.FromString(result.payload)
    field = output.loss_fn_outputs[0].fields["logprobs"]
    match how:
        case "a loss":
            output.metrics["loss:sum"] = math.nextafter(output.metrics["loss:sum"], 1e9)
        case "a log-prob":
            field.data = field.data[:-1] + bytes([field.data[-1] ^ 1])
        case "a length":
            field.data = field.data[:-4]
        case "a metric less":
            del output.metrics["loss:sum"]
        case "a failure":
            return Result.failed("no", "user").encode()
    return Result(ResultKind.PASS, output.SerializeToString()).encode()


@pytest.mark.parametrize(
    "how", ["a loss", "a failure", "a norm", *map(variant, ("a log-prob", "a length", "a metric less"))]
)
async def test_a_replay_with_other_results_stops_its_run_alone(
    server: Stack, engine: Engine, redis: Any, how: str
) -> None:
    broken, neighbour = await killed_after(server, engine, last=4)
    name = redis_keys.result(request_id(broken.id, 4 if how == "a norm" else 1))
    redis.set(name, tampered(redis.get(name), how))
    await assert_stopped_alone(server, engine, broken, neighbour, first=5)
    assert redis.hget(redis_keys.counters(POOL), "diverged_runs") == b"1"


@pytest.mark.parametrize("is_gone", [False, variant(True)])
async def test_a_large_result_is_compared_too_while_it_exists(
    server: Stack, tmp_path: Path, engine: Engine, redis: Any, is_gone: bool
) -> None:
    run = await server.create("a", "a", LORA)
    with worker(server, engine, drains=False):
        large = await server.forward_backward(run, 1, LARGE)
        whole = await server.result(run, large)
    stored = Result.decode(redis.get(redis_keys.result(large)))
    assert stored.kind is ResultKind.SPOOLED_PASS
    spool = Spool(tmp_path / "spool", new_writer("forger"))
    payload = Result.decode(tampered(whole.encode(), "a log-prob")).payload
    forged = spool.put(payload).result()
    spool.close()
    if is_gone:
        (tmp_path / "spool" / SpoolRef.parse(forged).segment).unlink()
    redis.set(redis_keys.result(large), Result(stored.kind, forged.encode()).encode())
    engine.adapters.drop(run.id)
    with worker(server, engine):
        step = await server.result(run, await server.optim_step(run, 2))
    assert (step == RUN_STOPPED) is not is_gone


async def test_a_worker_without_descriptors_pauses_and_stops_no_run(
    server: Stack, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while, neither ops to run nor ops to replay can be read."""
    run = await server.create("a", "a", LORA)
    with worker(server, engine, drains=False):
        first = await server.result(run, await server.forward_backward(run, 1, LARGE))
    engine.adapters.drop(run.id)
    request = await server.forward_backward(run, 2, LARGE)
    open_file, refused = Path.open, 0

    def exhausted(path: Path, mode: str, **more: Any) -> Any:
        nonlocal refused
        if path.parent == tmp_path / "spool" and refused < 5:
            refused += 1
            no_descriptor()
        return open_file(path, mode, **more)

    monkeypatch.setattr(Path, "open", exhausted)
    with worker(server, engine):
        second = await server.result(run, request)
        assert refused == 5
        assert (await server.futures._records.run(run.tenant, run.id)).state is RunState.LIVE
    assert without_cycle(first) == without_cycle(second)  # the same datums, the same weights
