"""Worker without an engine: it commits and resolves the results of a test through the real store."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from cotrain_scheduler.planner import runnable_prefix
from cotrain_server.services import Services
from cotrain_store.bodies.adapter_bodies import LoadRequest, SaveRequest
from cotrain_store.disk.spool import RESULTS, new_writer
from cotrain_store.messages.ids import OpId, RequestId, RunId, SessionId, TenantId, WeightsRef, WorkerId
from cotrain_store.messages.ops import PASSES, OpKind, QueuedOp, Result, ResultKind, RunUsage, SampleUsage, Step
from cotrain_store.messages.runs import (
    CheckpointRecord,
    HistoryEntry,
    LoraSpec,
    PassEntry,
    SamplerRecord,
    SaveRecords,
    StepEntry,
    WeightsRecord,
)
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import open_sync_connection
from cotrain_store.sampling.claims import ClaimedSample, SampleClaims
from cotrain_store.weights import SavedWeights
from cotrain_workers.sample_output import encode_sample_output
from tests.support.http_api import POOL

WORKER = WorkerId("w0")
#: Digest and size in bytes of the files of every save.
FILES = ("d" * 64, 1_000)
#: Device time in seconds of every run in every step.
DEVICE_S = 0.25
#: Gradient norm of every optimizer step.
NORM = 1 / 3
TYPE_BY_KIND = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


class StandIn:
    """Worker of the API's pool, and its scheduler."""

    def __init__(self, execution: Execution, sampling: SampleClaims, saved: SavedWeights, dispatch: Dispatch) -> None:
        self.execution = execution
        self.sampling = sampling
        self.saved = saved
        self._dispatch = dispatch

    async def run_log(self, *, stores: bool = True) -> list[WeightsRecord]:
        """Plan and commit everything runnable. A save leaves the records that a worker's does.

        Its files count as durable at once, though nothing is written. With `stores` false, they
        count as durable when `store` is called with the returned records.
        """
        owed = []
        await self._dispatch.lead()
        while queues := await self._dispatch.ready(POOL.id):
            ops = tuple(op for queue in queues for op in runnable_prefix(queue.ops))
            tenants = {queue.run: queue.tenant for queue in queues}
            cycle = (await self._dispatch.view(POOL.id)).cycle + 1
            step = Step(cycle, WORKER, ops, time.time(), tenants)
            await self._dispatch.plan(POOL.id, step)
            owed += [records.weights for records in self._commit(step).values()]
            if stores:
                self.store(owed)
        return owed

    def store(self, owed: Sequence[WeightsRecord]) -> None:
        """Mark the files of saves as durable. A second call has no effect."""
        for weights in owed:
            self.saved.mark_stored(weights.ref, *FILES, optimizer_of(weights))

    def claim(self) -> list[ClaimedSample]:
        """Claim every waiting sample request."""
        return self.sampling.claim(1_000)

    def finish(
        self, request: RequestId, *sequences: Sequence[int], usage: SampleUsage | None = None, **changes: Any
    ) -> None:
        """Resolve a request to sequences of these tokens."""
        result = Result(ResultKind.SAMPLE, encode_sample_output(output(*sequences, **changes)))
        self.sampling.resolve({request: result}, {}, {request: usage} if usage else {})

    def fail(self, request: RequestId, message: str = "no") -> None:
        """Resolve a request to a failure."""
        self.sampling.resolve({request: Result.failed(message, "user")}, {})

    def _commit(self, step: Step) -> dict[OpId, SaveRecords]:
        results, saves = {}, {}
        found: dict[OpId, HistoryEntry] = {}
        for op, body in zip(step.ops, self.execution.bodies(step.ops), strict=True):
            place = op.id
            assert body is not None
            results[place] = Result.of_json({"model_id": op.run})
            if op.kind is OpKind.REJECTED:
                results[place] = Result(ResultKind.FAILURE, body)
            elif op.kind in PASSES:
                found[place] = PassEntry(loss_of(op.seq), 3.0, op.kind is OpKind.FORWARD)
            elif op.kind is OpKind.OPTIM_STEP:
                found[place] = StepEntry(NORM, json.loads(body)["learning_rate"])
            elif op.kind is OpKind.LOAD:
                said = {"path": LoadRequest.parse(body).path, "model_id": op.run}
                results[place] = Result.of_json(said | {"type": "load_weights"})
            elif op.kind is OpKind.SAVE:
                request = SaveRequest.parse(body)
                records = save_records(op, step.tenant_by_run[op.run], request)
                saves[place] = records
                results[place] = save_result(records.user, request)
        tokens = Counter[RunId]()
        for op in step.ops:
            tokens[op.run] += op.tokens
        usage = {run: RunUsage(tokens[run], DEVICE_S) for run in tokens}
        self.execution.commit(step, results, {}, {}, saves=saves, usage=usage, found=found)
        return saves


def loss_of(seq: int) -> float:
    """Return the loss of the pass with this seq. As text, it needs more than 14 digits."""
    return seq + 0.1 + 0.2


@contextlib.contextmanager
def stand_in(services: Services) -> Iterator[StandIn]:
    """Start as the worker of the API's pool."""
    settings = services.settings
    redis, writer = open_sync_connection(settings.redis_url), new_writer("stand-in")
    spool, results = (settings.open_spool(name) for name in (writer, RESULTS + writer))
    execution = Execution(redis, spool, results, POOL.id, WORKER)
    epoch = execution.claim()
    execution.publish(POOL)
    sampling = SampleClaims(redis, spool, results, POOL.id, WORKER, epoch)
    saved = SavedWeights(redis, POOL.id, WORKER, epoch)
    try:
        yield StandIn(execution, sampling, saved, Dispatch(services.connection, "scheduler"))
    finally:
        spool.close()
        results.close()
        redis.close()


def output(*sequences: Sequence[int], stop_reason: Literal["stop", "length"] = "length", **changes: Any) -> Any:
    """Make the output of a decoder, in which the log-prob of every token is minus its id."""
    whole = {
        "sequences": [
            SimpleNamespace(
                tokens=np.asarray(tokens, np.int32),
                logprobs=-np.asarray(tokens, np.float32),
                stop_reason=stop_reason,
                topk=None,
                routed_experts=None,
            )
            for tokens in sequences
        ],
        "prompt_logprobs": None,
        "topk_prompt": None,
        "target_prompt_logprobs": None,
        "cached_prompt_tokens": 0,
        "prompt_routed_experts": None,
    }
    return SimpleNamespace(**whole | changes)


def save_records(op: QueuedOp, tenant: TenantId, save: SaveRequest) -> SaveRecords:
    """Make the records of a save as a worker does."""
    ref = WeightsRef(op.request_id)
    common: Any = {"tenant": tenant, "base_model": POOL.base_model, "created_at": time.time()}
    weights = WeightsRecord(
        ref=ref, run=op.run, pool=POOL.id, worker=WORKER, lora=LoraSpec(rank=4, seed=0),
        has_optimizer=save.kind == "weights", external=bool(save.age_recipients), **common,
    )  # fmt: skip
    if save.name is not None:
        ttl_s = save.ttl_seconds
        checkpoint = CheckpointRecord(
            run=op.run, kind=save.kind, name=save.name, weights=ref,
            user_metadata=save.user_metadata,
            expires_at=None if ttl_s is None else common["created_at"] + ttl_s, **common,
        )  # fmt: skip
        return SaveRecords(weights, checkpoint, overwrite=save.overwrite, last=save.last)
    assert save.sampler is not None
    sampler = SamplerRecord(
        id=save.sampler,
        session=SessionId(save.sampler.partition(":")[0]),
        pool=POOL.id,
        model_path=None,
        weights=ref,
        ephemeral=True,
        **common,
    )
    return SaveRecords(weights, sampler)


def optimizer_of(weights: WeightsRecord) -> str:
    """Return the digest of the optimizer state file, or "" if there is none."""
    return FILES[0] if weights.has_optimizer else ""


def save_result(user: CheckpointRecord | SamplerRecord, request: SaveRequest) -> Result:
    """Return the result of a save."""
    said: dict[str, Any] = {"type": TYPE_BY_KIND[request.kind]}
    if isinstance(user, CheckpointRecord):
        return Result.of_json(said | {"path": user.path} | request.answer)
    return Result.of_json(said | {"path": None, "sampling_session_id": user.id})
