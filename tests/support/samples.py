"""Sampling part of the store on a real Redis, driven step by step, without a decoder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.errors import CheckpointNotFound
from cotrain_store.messages.ids import OpId, PoolId, RequestId, SessionId, TenantId, WeightsRef, WorkerId, sampler_id
from cotrain_store.messages.ops import OpKind, Result, ResultKind, Step
from cotrain_store.messages.runs import (
    CheckpointKind,
    CheckpointRecord,
    LoraSpec,
    RunRecord,
    SamplerRecord,
    SaveRecords,
    WeightsRecord,
)
from cotrain_store.oplog.execution import Execution
from cotrain_store.results.completions import Completions
from cotrain_store.sampling.claims import SampleClaims
from cotrain_store.sampling.intake import SampleIntake
from cotrain_store.tenants.quotas import Quotas
from cotrain_store.tenants.records import Records
from cotrain_store.weights import SavedWeights
from tests.support.limits import always
from tests.support.log import WORKER, Log, open_log
from tests.support.stack import MODEL, POOL, pool_record_for_tests

BODY = SampleBody(
    prompt=(1, 2, 3),
    num_samples=1,
    max_tokens=4,
    temperature=1.0,
    top_k=-1,
    top_p=1.0,
    seed=7,
    stop=None,
    prompt_logprobs=False,
    topk_prompt_logprobs=0,
    topk_sample_logprobs=0,
    prompt_logprobs_last_n=None,
    target_prompt_logprobs=None,
    stream=False,
)
#: Request with a body too large to be stored with it in Redis.
LARGE_BODY = replace(BODY, prompt=tuple(range(5_000)))
RESULT = Result(ResultKind.SAMPLE, b"tokens")


def sampler_record(
    tenant: str = "a", number: int = 0, weights: WeightsRef | None = None, *, ephemeral: bool = False
) -> SamplerRecord:
    """Return a sampler's record. Its session is named after its tenant."""
    session = SessionId(f"session-of-{tenant}")
    path = f"tinker://{weights}/sampler_weights/x" if weights and not ephemeral else None
    return SamplerRecord(
        sampler_id(session, number), TenantId(tenant), session, POOL, MODEL, path, weights,
        ephemeral=ephemeral, created_at=time.time(),
    )  # fmt: skip


def weights_record(run: RunRecord, seq: int) -> WeightsRecord:
    """Return the record of weights that the test's worker copied out of a run."""
    return WeightsRecord(
        ref_of(run, seq), run.id, run.tenant, POOL, WORKER, MODEL,
        LoraSpec(rank=1, seed=0), time.time(),
    )  # fmt: skip


def ref_of(run: RunRecord, seq: int) -> WeightsRef:
    """Return the reference to the weights that a save of a run made."""
    return WeightsRef(f"{run.id}:{seq}")


def count_waiting(redis: Any, pool: PoolId) -> int:
    """Count the sample requests that wait in the pool, for any worker or for one."""
    tenants = [TenantId(name.decode()) for name in redis.lrange(redis_keys.sample_ring(pool), 0, -1)]
    loads = [redis.hget(redis_keys.sample_load(pool, tenant), "waiting") for tenant in tenants]
    return sum(int(waiting or 0) for waiting in loads)


@dataclass
class Samples:
    """Every role of sampling, in addition to those of the log."""

    log: Log
    records: Records
    intake: SampleIntake
    sampling: SampleClaims
    saved: SavedWeights

    async def sampler(self, tenant: str = "a", number: int = 0) -> SamplerRecord:
        """Make a sampler of the base model."""
        return await self.records.create_sampler(sampler_record(tenant, number))

    async def submit(self, sampler: SamplerRecord, *seqs: int) -> list[RequestId]:
        """Accept one small request for each seq."""
        return [await self.intake.submit(sampler, seq, BODY) for seq in seqs]

    def claim(self, most: int = 64) -> list[RequestId]:
        """Claim requests. Return their ids."""
        return [claimed.request for claimed in self.sampling.claim(most)]

    def resolve(self, *requests: RequestId, result: Result = RESULT) -> None:
        """End requests with the same result."""
        self.sampling.resolve(dict.fromkeys(requests, result), {"sample_requests": len(requests)})

    def new_worker(self, worker: WorkerId = WORKER) -> SampleClaims:
        """Replace a worker by another process."""
        log = self.log
        execution = Execution(log.redis, log.spool, log.results, POOL, worker)
        epoch = execution.claim()
        execution.publish(pool_record_for_tests())
        return SampleClaims(log.redis, log.spool, log.results, POOL, worker, epoch)

    def beat(self, worker: WorkerId) -> None:
        """Write a heartbeat of a worker."""
        self.log.redis.set(redis_keys.worker(POOL, worker), "{}")

    async def save(self, run: RunRecord, seq: int, **how: Any) -> tuple[Step, Mapping[OpId, SaveRecords]]:
        """Commit a save under a name, or as an ephemeral sampler (see `describe_save`)."""
        saves = await self.describe_save(run, seq, **how)
        step = await self.log.plan()
        results = {op.id: Result.of_json({"seq": op.seq}) for op in step.ops}
        self.log.execution.commit(step, results, {}, {}, saves=saves)
        return step, saves

    async def describe_save(
        self,
        run: RunRecord,
        seq: int,
        *,
        name: str = "",
        sampler: int = -1,
        expires_at: float | None = None,
        kind: CheckpointKind = "sampler_weights",
        external: bool = False,
        overwrite: bool = False,
        last: bool = False,
        user_metadata: dict[str, Any] | None = None,
    ) -> dict[OpId, SaveRecords]:
        """Accept a save. Return the records that its commit must write."""
        await self.log.submit(run, seq, OpKind.SAVE, body=b"{}")
        has_optimizer = kind == "weights"
        weights = replace(weights_record(run, seq), has_optimizer=has_optimizer, external=external)
        user: CheckpointRecord | SamplerRecord
        if name:
            user = CheckpointRecord(
                run.id, run.tenant, kind, name, weights.ref, MODEL, time.time(), expires_at,
                user_metadata or {},
            )  # fmt: skip
        else:
            user = sampler_record(run.tenant, sampler, weights.ref, ephemeral=True)
        return {(run.id, seq): SaveRecords(weights, user, overwrite, last)}

    async def checkpoint(self, run: RunRecord, seq: int, name: str, **how: Any) -> CheckpointRecord:
        """Save under a name, and store it. Return the checkpoint."""
        await self.save(run, seq, name=name, **how)
        self.stored(run, seq)
        kind = how.get("kind", "sampler_weights")
        return await self.records.checkpoint(run.tenant, f"tinker://{run.id}/{kind}/{name}")

    async def found(self, run: RunRecord, name: str = "x", kind: CheckpointKind = "weights") -> CheckpointRecord | None:
        """Return a checkpoint, or None if its tenant finds none under that name."""
        try:
            return await self.records.checkpoint(run.tenant, f"tinker://{run.id}/{kind}/{name}")
        except CheckpointNotFound:
            return None

    def stored(self, run: RunRecord, seq: int, size: int = 10, optimizer: str = "") -> bool:
        """Mark the files of a save as durable. Each has its own content."""
        ref = ref_of(run, seq)
        return self.saved.mark_stored(ref, f"digest of {ref}", size, optimizer)

    def load(self, tenant: str = "a") -> tuple[int, int, int]:
        """Return the (waiting, running, bytes) of a tenant."""
        row = self.log.redis.hmget(redis_keys.sample_load(POOL, TenantId(tenant)), ["waiting", "running", "bytes"])
        waiting, running, size = (int(value or 0) for value in row)
        return waiting, running, size

    def result(self, request: RequestId) -> Result | None:
        """Return the result of a request."""
        packed = self.log.redis.get(redis_keys.result(request))
        return Result.decode(packed) if packed else None

    def completions(self) -> Completions:
        """Return the completions of an API process."""
        return Completions(self.log.connection)


@contextlib.asynccontextmanager
async def open_samples(
    redis_url: str, data_dir: Path, limits: Quotas | None = None, disk_reserve_bytes: int = 0
) -> AsyncIterator[Samples]:
    """Open every role of the store on one Redis."""
    async with open_log(redis_url, data_dir) as log:
        intake = SampleIntake(log.connection, log.spool, always(limits or Quotas()), disk_reserve_bytes)
        sampling = SampleClaims(log.redis, log.spool, log.results, POOL, WORKER, log.execution.epoch)
        saved = SavedWeights(log.redis, POOL, WORKER, log.execution.epoch)
        yield Samples(log, Records(log.connection), intake, sampling, saved)
