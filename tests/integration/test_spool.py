"""Spool next to a full disk, and next to a sweep while its writer hangs: a delay, and no lost or changed number."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.blobs.folder import Folder
from cotrain_store.disk.object_spool import ObjectSpool
from cotrain_store.disk.spool import RESULTS, SpoolRef, SpoolReferences, new_writer
from cotrain_store.errors import Reason
from cotrain_store.messages.ops import OpKind, Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.intake import Intake
from cotrain_store.sampling.claims import SampleClaims
from cotrain_store.sampling.intake import SampleIntake
from cotrain_store.tenants.quotas import Quotas
from cotrain_workers.engine.engine import Engine
from tests.support.bodies import sequences
from tests.support.limits import always
from tests.support.lives import pass_time
from tests.support.log import WORKER, Log, record_of
from tests.support.program import LORA, results
from tests.support.refusals import refused
from tests.support.samples import LARGE_BODY, Samples
from tests.support.stack import POOL, Stack, pool_record_for_tests, worker
from tests.support.waiting import until

LARGE = sequences(0, 12, 500)  # its result goes to the spool


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Return a function that makes the next `times` syncs of the spool fail, and counts them."""
    sync, left, failed = os.fdatasync, [0.0], [0]

    def fdatasync(file: int) -> None:
        if left[0] > 0:
            left[0] -= 1
            failed[0] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr("cotrain_store.disk.spool.os.fdatasync", fdatasync)

    def fill(times: float) -> list[int]:
        left[0] = times
        return failed

    return fill


async def trained(server: Stack, engine: Engine) -> tuple[RunRecord, Any]:
    """Make a run and its first gradient while there is free space.

    Return the run and the answer.
    """
    run = await server.create("a", "a", LORA)
    with worker(server, engine):
        return run, await results(server, run, [await server.forward_backward(run, 1, LARGE)])


async def test_a_result_waits_for_free_space(server: Stack, engine: Engine, disk: Callable[[float], list[int]]) -> None:
    other, expected = await trained(server, engine)
    run = await server.create("b", "b", LORA)
    request = await server.forward_backward(run, 1, LARGE)
    failed = disk(3)
    with worker(server, engine):
        assert await results(server, run, [request]) == expected
    assert failed == [3]
    assert engine.adapters.state(run.id).grads.equal(engine.adapters.state(other.id).grads)


async def test_a_worker_stopped_on_a_full_disk_leaves_the_step_to_the_next(
    server: Stack, engine: Engine, disk: Callable[[float], list[int]]
) -> None:
    other, expected = await trained(server, engine)
    run = await server.create("b", "b", LORA)
    request = await server.forward_backward(run, 1, LARGE)
    failed = disk(float("inf"))
    with worker(server, engine):
        await until(lambda: failed[0] >= 2)
    disk(0)
    with worker(server, engine):
        assert await results(server, run, [request]) == expected
    assert engine.adapters.state(run.id).grads.equal(engine.adapters.state(other.id).grads)


LARGE_BYTES = b"large" * 10_000


class SlowSpool(ObjectSpool):
    """A spool whose process hangs after the first put, until a sweep has removed the file."""

    references: SpoolReferences
    swept = 0

    @override
    def put(self, payload: bytes) -> Future[str]:
        durable = super().put(payload)
        if not self.swept:
            self.swept += 1
            for segment in self.references.close([SpoolRef.parse(durable.result()).segment]):
                self._blobs.delete(segment)
        return durable


@pytest.fixture
def spools(log: Log, tmp_path: Path) -> Iterator[tuple[SlowSpool, SlowSpool]]:
    """Spools of bodies and of results."""
    blobs = Folder(tmp_path).below("objects")
    made = tuple(SlowSpool(blobs, part + new_writer("slow"), tmp_path) for part in ("", RESULTS))
    for spool in made:
        spool.references = SpoolReferences(log.redis)
    yield made[0], made[1]
    for spool in made:
        spool.close()


async def test_a_request_with_a_swept_body_is_accepted_only_when_sent_again(
    log: Log, spools: tuple[SlowSpool, SlowSpool]
) -> None:
    intake = Intake(log.connection, spools[0], always(Quotas()))
    run = await log.new_run()
    with refused(Reason.BODY_SWEPT):
        await intake.submit(run, 1, OpKind.FORWARD_BACKWARD, LARGE_BYTES, 7, digest="d")
    assert log.references() == {}
    await intake.submit(run, 1, OpKind.FORWARD_BACKWARD, LARGE_BYTES, 7, digest="d")
    (segment,) = log.references()
    assert spools[0].read_each([op.ref for op in (await log.plan()).ops[1:]]) == [LARGE_BYTES]
    assert spools[0].references.close([segment]) == []


async def test_a_run_with_a_swept_first_body_is_made_only_when_sent_again(
    log: Log, spools: tuple[SlowSpool, SlowSpool]
) -> None:
    intake = Intake(log.connection, spools[0], always(Quotas()))
    run = record_of("a")
    with refused(Reason.BODY_SWEPT):
        await intake.create_run(run, kind=OpKind.LOAD, body=LARGE_BYTES)
    assert not log.redis.exists(redis_keys.run(run.id), redis_keys.log(POOL, run.id))
    await intake.create_run(run, kind=OpKind.LOAD, body=LARGE_BYTES)
    assert len(log.references()) == 1


async def test_a_sample_request_with_a_swept_body_must_be_sent_again(
    samples: Samples, spools: tuple[SlowSpool, SlowSpool]
) -> None:
    intake = SampleIntake(samples.log.connection, spools[0], always(Quotas()))
    sampler = await samples.sampler()
    with refused(Reason.BODY_SWEPT):
        await intake.submit(sampler, 0, LARGE_BODY)
    assert samples.load() == (0, 0, 0)
    await intake.submit(sampler, 0, LARGE_BODY)
    assert len(samples.log.references()) == 1


async def test_results_swept_before_their_commit_are_written_again(
    log: Log, spools: tuple[SlowSpool, SlowSpool]
) -> None:
    run = await log.new_run()
    execution = Execution(log.redis, log.spool, spools[1], POOL, WORKER)
    execution.claim()
    execution.publish(pool_record_for_tests())
    step = await log.plan()
    result = Result(ResultKind.PASS, LARGE_BYTES)
    execution.commit(step, {(run.id, 0): result}, {"cycle": step.cycle}, {"cycles": 1})
    assert spools[1].swept
    stored = log.result(run, 0)
    assert stored
    assert spools[1].read(stored.payload.decode()) == LARGE_BYTES


async def test_samples_swept_before_they_are_stored_are_written_again(
    samples: Samples, spools: tuple[SlowSpool, SlowSpool]
) -> None:
    log = samples.log
    (request,) = await samples.submit(await samples.sampler(), 0)
    worker = log.new_worker()
    claims = SampleClaims(log.redis, log.spool, spools[1], POOL, WORKER, worker.epoch)
    claims.claim(1)
    claims.resolve({request: Result(ResultKind.SAMPLE, LARGE_BYTES)}, {})
    assert spools[1].swept
    stored = samples.result(request)
    assert stored
    assert spools[1].read(stored.payload.decode()) == LARGE_BYTES


async def test_referenced_files_stay_and_later_ones_are_swept(log: Log) -> None:
    references = SpoolReferences(log.redis)
    log.redis.hset(redis_keys.spool_segment_refs(), "api-1", 1)
    log.redis.hset(redis_keys.spool_results(), "answers-api-1", 1)
    assert references.close(["api-0", "api-1", "answers-api-1", "api-2", "odd"]) == [
        "api-0", "api-2", "odd",
    ]  # fmt: skip
    assert log.redis.get(redis_keys.spool_swept("api")) == b"2"
    assert references.close(["api-0"]) == ["api-0"]  # the process that should remove it has crashed
    assert log.redis.get(redis_keys.spool_swept("api")) == b"2"
    assert references.referenced() == {"api-1", "answers-api-1"}


async def test_swept_files_are_forgotten_after_a_month(log: Log) -> None:
    SpoolReferences(log.redis).close(["api-7"])
    pass_time(log.redis, redis_keys.SWEPT_TTL_MS - 60_000)
    await log.dispatch.pass_time()
    assert log.redis.exists(redis_keys.spool_swept("api"))
    pass_time(log.redis, 120_000)
    await log.dispatch.pass_time()
    assert not log.redis.exists(redis_keys.spool_swept("api"))
    assert not log.redis.zcard(redis_keys.ends())
