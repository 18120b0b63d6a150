"""Forks of a run: from the memory of its worker, and with the same bits after any kill."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cotrain_store import redis_keys
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.messages.ids import RequestId, SamplerId, SessionId, TenantId, WeightsRef, encode, run_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.oplog.joint_intake import JointOp
from cotrain_workers.checkpoints.files import CheckpointFiles
from cotrain_workers.engine.engine import Engine
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.program import LORA, restored_digest, results, submit, undisturbed
from tests.support.redis_server import EmbeddedRedis
from tests.support.stack import MODEL, POOL, Stack, worker

STEP = 4  # ops of one step of the program
A, S = TenantId("a"), SessionId("a")


async def save(server: Stack, run: RunRecord, seq: int) -> RequestId:
    """Submit an unnamed save with the optimizer state, and wait for its commit."""
    body = SaveRequest(sampler=SamplerId(f"{run.session}:sample:0"), kind="weights")
    request = await server.intake.submit(run, seq, OpKind.SAVE, encode(body).encode(), 0, digest="save")
    await server.result(run, request)
    return request


async def fork(server: Stack, ref: str, count: int) -> list[RunRecord]:
    """Accept forks of saved weights, and the second step of the program for each."""
    body = encode(LoadRequest("x", (LoadSource(WeightsRef(ref)),), True, LORA)).encode()
    runs = [RunRecord(run_id(S, number), A, S, POOL, MODEL, LORA, time.time()) for number in range(1, count + 1)]
    ops = [JointOp(run, 0, OpKind.LOAD, body, 0, "fork", WeightsRef(ref)) for run in runs]
    for _ in range(2):  # a repeat creates no other runs
        accepted = await server.intake.submit_together(A, ops)
        assert accepted == [f"{run.id}:0" for run in runs]
    return runs


@pytest.mark.parametrize(
    "failpoint",
    [variant(Failpoint("commit", 1)), Failpoint("commit", 1, after=True), Failpoint("stored", 1, of_weights=True)],
    ids=lambda failpoint: f"{failpoint.method}-{failpoint.after}",
)
async def test_forks_of_unstored_weights_end_as_the_run_whenever_their_worker_is_killed(
    server: Stack,
    empty_redis: EmbeddedRedis,
    tmp_path: Path,
    engine: Engine,
    redis: Any,
    monkeypatch: pytest.MonkeyPatch,
    failpoint: Failpoint,
) -> None:
    url = empty_redis.url
    expected, digest = await undisturbed(server, url, tmp_path, engine, last=2 * STEP)

    def full(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as disk:
        disk.setattr(CheckpointFiles, "write", full)
        parent, other = [await server.create(name, name, LORA) for name in "ab"]
        with worker(url, tmp_path, engine, drains=False):
            await save(server, other, 1)  # a worker recreates its weights first
            await submit(server, parent, 1, STEP)
            saved = await save(server, parent, STEP + 1)
        forks = await fork(server, saved, 2)
        requests = [await submit(server, each, STEP + 1, 2 * STEP, place=1) for each in forks]
        for run in (parent, other, *forks):
            engine.adapters.drop(run.id)
        if failpoint.of_weights:
            disk.undo()
        async with dying_worker(url, tmp_path, engine, failpoint):
            pass
        assert redis.hget(redis_keys.weights(WeightsRef(saved)), "digest") == b""
    for run in (parent, other, *forks):
        engine.adapters.drop(run.id)
    with worker(url, tmp_path, engine):
        for run, asked in zip(forks, requests, strict=True):
            assert await results(server, run, asked) == expected[STEP:]
        rest = await submit(server, parent, STEP + 1, 2 * STEP, place=STEP + 2)
        assert await results(server, parent, rest) == expected[STEP:]
    for run in (parent, *forks):
        assert restored_digest(url, tmp_path, engine, run.id) == digest
