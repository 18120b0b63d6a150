"""Runs that begin with foreign weights, forked or imported: the same bits, also if their process is killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain_store import redis_keys
from cotrain_store.blobs.folder import Folder
from cotrain_store.bodies.adapter_bodies import (
    LoadRequest,
    LoadSource,
    PeftAdapter,
    PeftModule,
    SaveRequest,
    encode_import,
)
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.messages.ids import RequestId, SamplerId, SessionId, TenantId, WeightsRef, encode, request_id, run_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import LoraSpec, RunRecord, RunState
from cotrain_store.oplog.joint_intake import JointOp
from cotrain_workers.checkpoints.files import CheckpointFiles
from cotrain_workers.checkpoints.peft_folder import read_folder
from cotrain_workers.engine.adapters.peft_import import read_import
from cotrain_workers.engine.engine import Engine
from cotrain_workers.op_codec import peft_adapter
from tests.support.checkpoints import run_from
from tests.support.deaths import Failpoint, dying_worker
from tests.support.draws import variant
from tests.support.program import LORA, restored_digest, results, submit, undisturbed
from tests.support.stack import MODEL, POOL, Stack, worker
from tests.support.uploads import safetensors

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
    [variant(Failpoint("commit", 1)), Failpoint("commit", 1, after=True), Failpoint("mark_stored", 1, of_weights=True)],
    ids=lambda failpoint: f"{failpoint.method}-{failpoint.after}",
)
async def test_forks_of_unstored_weights_end_as_the_run_whenever_their_worker_is_killed(
    server: Stack, engine: Engine, redis: Any, monkeypatch: pytest.MonkeyPatch, failpoint: Failpoint
) -> None:
    expected, digest = await undisturbed(server, engine, last=2 * STEP)

    def full(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as disk:
        disk.setattr(CheckpointFiles, "write", full)
        parent, other = [await server.create(name, name, LORA) for name in "ab"]
        with worker(server, engine, drains=False):
            await save(server, other, 1)  # a worker recreates its weights first
            await submit(server, parent, 1, STEP)
            saved = await save(server, parent, STEP + 1)
        forks = await fork(server, saved, 2)
        requests = [await submit(server, each, STEP + 1, 2 * STEP, place=1) for each in forks]
        for run in (parent, other, *forks):
            engine.adapters.drop(run.id)
        if failpoint.of_weights:
            disk.undo()
        async with dying_worker(server, engine, failpoint):
            pass
        assert redis.hget(redis_keys.weights(WeightsRef(saved)), "digest") == b""
    for run in (parent, other, *forks):
        engine.adapters.drop(run.id)
    with worker(server, engine):
        for run, asked in zip(forks, requests, strict=True):
            assert await results(server, run, asked) == expected[STEP:]
        rest = await submit(server, parent, STEP + 1, 2 * STEP, place=STEP + 2)
        assert await results(server, parent, rest) == expected[STEP:]
    for run in (parent, *forks):
        assert restored_digest(server, engine, run.id) == digest


IMPORTED = LoraSpec(rank=32, seed=0, train_mlp=False, train_unembed=False)
Q_PROJ = "model.layers.0.self_attn.q_proj"


def an_import(inputs: int = 64) -> bytes:
    """An adapter of rank 32 on one module of the tiny model, in another scale than ours."""
    a, b = (f"base_model.model.{Q_PROJ}.lora_{letter}.weight" for letter in "AB")
    tensors = safetensors({a: (32, inputs), b: (128, 32)})
    return encode_import(PeftAdapter(IMPORTED, (PeftModule(Q_PROJ, a, b, scale=0.3),), tensors))


async def upload(server: Stack, body: bytes, model_seq: int = 0) -> RunRecord:
    """Queue both ops of an upload, as the route does."""
    session = SessionId("a")
    run = RunRecord(run_id(session, model_seq), TenantId("a"), session, POOL, MODEL, IMPORTED, time.time())
    await server.intake.create_run(run, kind=OpKind.IMPORT, body=body)
    save = encode(SaveRequest(name="mine", kind="weights", last=True)).encode()
    await server.intake.submit(run, 1, OpKind.SAVE, save, 0, digest="1")
    return run


@pytest.mark.parametrize(
    "failpoint",
    [
        variant(Failpoint("bodies", 1)),
        variant(Failpoint("commit", 1)),
        Failpoint("commit", 1, after=True),
        Failpoint("mark_stored", 1, of_weights=True),
        variant(Failpoint("mark_stored", 1, after=True, of_weights=True)),
    ],
    ids=str,
)
async def test_an_upload_becomes_the_same_checkpoint_wherever_its_worker_is_killed(
    server: Stack, tmp_path: Path, engine: Engine, failpoint: Failpoint
) -> None:
    body = an_import()
    assert len(body) > INLINE_LIMIT_BYTES
    run = await upload(server, body)
    async with dying_worker(server, engine, failpoint):
        pass
    engine.adapters.drop(run.id)
    with worker(server, engine):
        imported = await server.result(run, request_id(run.id, 0))
        assert imported.json()["model_id"] == run.id
        path = (await server.result(run, request_id(run.id, 1))).json()["path"]
        checkpoint = await server.records.checkpoint(run.tenant, path)
        other = await run_from(server, "a", "b", checkpoint, lora=IMPORTED)
        await server.result(other, request_id(other.id, 0))

    expected = read_import(peft_adapter(body), engine.adapters.layout_of, max_rank=32)
    record = await server.records.weights(checkpoint.weights)
    assert record is not None
    stored = read_folder(Folder(tmp_path / "weights"), record.digest, engine.adapters.layout_of)
    assert stored.spec == expected.spec
    assert torch.equal(stored.flat, expected.flat)
    assert (await server.records.run(run.tenant, run.id)).state is RunState.CLOSED


async def test_an_upload_that_does_not_fit_fails_with_the_reason_and_ends_its_run(
    server: Stack, engine: Engine
) -> None:
    with worker(server, engine):
        run = await upload(server, an_import(inputs=63))
        refused = (await server.result(run, request_id(run.id, 0))).json()
        not_saved = (await server.result(run, request_id(run.id, 1))).json()
        good = await upload(server, an_import(), model_seq=1)
        await server.result(good, request_id(good.id, 1))
    assert refused["category"] == not_saved["category"] == "user"
    assert "lora_A.weight has shape [32, 63]; this base model needs [32, 64]" in refused["error"]
    assert "creation failed" in not_saved["error"]
    assert (await server.records.run(run.tenant, run.id)).state is RunState.CLOSED
