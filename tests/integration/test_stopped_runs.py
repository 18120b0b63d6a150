"""A run that cannot be restored stops alone; its neighbours are unaffected."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cotrain.wire.proto import wire_pb2
from cotrain_store import redis_keys
from cotrain_store.disk.spool import Spool, SpoolRef, new_writer
from cotrain_store.disk.storage import RUN_STOPPED
from cotrain_store.messages.ids import request_id
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import RunRecord, RunState
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.draws import variant
from tests.support.full_table import no_descriptor
from tests.support.program import LORA, killed_after, results, snapshot_files, submit, undisturbed, without_cycle
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import POOL, Stack, worker

#: Its body is too large for Redis.
LARGE = sequences(0, 12, 500)


async def two_runs(server: Stack, url: str, folder: Path, engine: Engine, last: int) -> Any:
    """Train a run and its neighbour up to seq `last`, and leave both to their snapshots."""
    runs = [await server.create(name, name, LORA) for name in ("a", "b")]
    with worker(url, folder, engine):
        for run in runs:
            await results(server, run, await submit(server, run, 1, last))
    return runs


async def assert_stopped_alone(
    server: Stack, url: str, folder: Path, engine: Engine, broken: RunRecord, neighbour: RunRecord, first: int = 3
) -> None:
    """Submit two more requests to both; the broken run fails, its neighbour ends as if alone."""
    requests = await submit(server, broken, first, first + 1)
    others = await submit(server, neighbour, first, first + 1)
    with worker(url, folder, engine):
        for request in requests:
            assert await server.result(broken, request) == RUN_STOPPED
        answers = await results(server, neighbour, others)
    record = await server.futures._records.run(broken.tenant, broken.id)
    assert record.state is RunState.FAILED
    expected, digest = await undisturbed(server, url, folder, engine, last=first + 1)
    assert answers == expected[first - 1 :]
    assert engine.adapters.state(neighbour.id).digest() == digest


async def test_a_run_without_a_readable_snapshot_or_checkpoint_stops_alone(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    url = empty_redis.url
    broken, neighbour = await two_runs(server, url, tmp_path, engine, last=2)
    with worker(url, tmp_path, engine):
        for run in (broken, neighbour):
            await results(server, run, await submit(server, run, 3, 3))
    copies = snapshot_files(redis, broken, tmp_path)
    assert len(copies) == 2
    for copy in copies:
        copy.unlink()
    await assert_stopped_alone(server, url, tmp_path, engine, broken, neighbour, first=4)


async def test_a_missing_body_stops_its_run_alone(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any
) -> None:
    url = empty_redis.url
    broken, neighbour = await two_runs(server, url, tmp_path, engine, last=2)
    await submit(server, broken, 3, 3)
    redis.hdel(redis_keys.bodies(POOL, broken.id), 3)
    await assert_stopped_alone(server, url, tmp_path, engine, broken, neighbour)


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
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any, how: str
) -> None:
    url = empty_redis.url
    broken, neighbour = await killed_after(server, url, tmp_path, engine, last=4)
    name = redis_keys.result(request_id(broken.id, 4 if how == "a norm" else 1))
    redis.set(name, tampered(redis.get(name), how))
    await assert_stopped_alone(server, url, tmp_path, engine, broken, neighbour, first=5)
    assert redis.hget(redis_keys.counters(POOL), "diverged_runs") == b"1"


@pytest.mark.parametrize("is_gone", [False, variant(True)])
async def test_a_large_result_is_compared_too_while_it_exists(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, redis: Any, is_gone: bool
) -> None:
    url = empty_redis.url
    run = await server.create("a", "a", LORA)
    with worker(url, tmp_path, engine, drains=False):
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
    with worker(url, tmp_path, engine):
        step = await server.result(run, await server.optim_step(run, 2))
    assert (step == RUN_STOPPED) is not is_gone


async def test_a_worker_without_descriptors_pauses_and_stops_no_run(
    server: Stack, empty_redis: EmbeddedRedis, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while, neither ops to run nor ops to replay can be read."""
    url = empty_redis.url
    run = await server.create("a", "a", LORA)
    with worker(url, tmp_path, engine, drains=False):
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
    with worker(url, tmp_path, engine):
        second = await server.result(run, request)
        assert refused == 5
        assert (await server.futures._records.run(run.tenant, run.id)).state is RunState.LIVE
    assert without_cycle(first) == without_cycle(second)  # the same datums, the same weights
