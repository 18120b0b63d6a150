"""Log of one pool on a real Redis, driven step by step: no clock, no engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain_scheduler.planner import runnable_prefix
from cotrain_store import redis_keys
from cotrain_store.disk.spool import RESULTS, Spool, new_writer
from cotrain_store.messages.ids import OpId, RequestId, SessionId, TenantId, WorkerId, run_id
from cotrain_store.messages.ops import OpKind, Result, Step
from cotrain_store.messages.runs import LoraSpec, RunRecord
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.intake import Intake
from cotrain_store.redis_client.connection import open_connection, open_sync_connection
from cotrain_store.results.futures import Futures
from cotrain_store.tenants.quotas import Quotas
from tests.support.limits import always
from tests.support.stack import MODEL, POOL, pool_record_for_tests

WORKER = WorkerId("w0")


def record_of(tenant: str, session: str = "", lora: LoraSpec | None = None) -> RunRecord:
    """Return a run's record. By default, its session is named after its tenant."""
    opened = SessionId(session or f"session-of-{tenant}")
    lora = lora or LoraSpec(rank=1, seed=0)
    return RunRecord(run_id(opened, 0), TenantId(tenant), opened, POOL, MODEL, lora, time.time())


@dataclass
class Log:
    """Every role of the store, with direct access to their data."""

    redis: Any
    connection: Any
    spool: Spool
    results: Spool
    intake: Intake
    dispatch: Dispatch
    execution: Execution

    async def new_run(self, tenant: str = "a", session: str = "") -> RunRecord:
        """Accept a run."""
        run = record_of(tenant, session)
        await self.intake.create_run(run)
        return run

    async def submit(
        self,
        run: RunRecord,
        seq: int,
        kind: OpKind = OpKind.FORWARD_BACKWARD,
        *,
        body: bytes = b"body",
        tokens: int = 7,
    ) -> RequestId:
        """Accept one op. Its digest is that of its body."""
        takes_tokens = kind in (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)
        return await self.intake.submit(run, seq, kind, body, tokens if takes_tokens else 0, digest=str(hash(body)))

    async def plan(self, most: int = 64, allowances: Mapping[RequestId, int] | None = None) -> Step:
        """Plan everything runnable, at most `most` ops of each run."""
        queues = await self.dispatch.ready(POOL)
        ops = tuple(op for queue in queues for op in runnable_prefix(queue.ops)[:most])
        cycle = (await self.dispatch.view(POOL)).cycle + 1
        tenants = {queue.run: queue.tenant for queue in queues}
        step = Step(cycle, WORKER, ops, time.time(), tenants, dict(allowances or {}))
        await self.dispatch.plan(POOL, step)
        return step

    def commit(
        self, step: Step, *, said: str = "done", crashed: Collection[Any] = (), opened: Mapping[OpId, int] | None = None
    ) -> None:
        """Commit a step with the same result for each op.

        An op in `opened` and the later ops of its run get no result.
        """
        results = {
            op.id: Result.of_json({"said": said})
            for op in step.ops
            if all(op.run != run or op.seq < seq for run, seq in opened or ())
        }
        self.execution.commit(step, results, {"cycle": step.cycle}, {"cycles": 1}, crashed, opened=opened)

    async def run_all(self) -> None:
        """Plan and commit until nothing is ready."""
        while await self.dispatch.ready(POOL):
            self.commit(await self.plan())

    async def cover(self, run: RunRecord, last: int) -> None:
        """Truncate a run's log up to `last`, its last op, by a snapshot and another one an op later."""
        assert self.execution.register_snapshot(run.id, last, f"f{last}", "sha")
        await self.submit(run, last + 1)
        await self.run_all()
        assert self.execution.register_snapshot(run.id, last + 1, f"f{last + 1}", "sha")

    def new_worker(self) -> Execution:
        """Replace the worker by a second process."""
        execution = Execution(self.redis, self.spool, self.results, POOL, WORKER)
        execution.claim()
        execution.publish(pool_record_for_tests())
        return execution

    def futures(self) -> Futures:
        """Return the waiting requests of another API process."""
        return Futures(self.connection, self.spool)

    def result(self, run: RunRecord, seq: int) -> Result | None:
        """Return the result of a request."""
        packed = self.redis.get(redis_keys.result(RequestId(f"{run.id}:{seq}")))
        return Result.decode(packed) if packed else None

    def queued(self, tenant: str = "a") -> tuple[int, int, int]:
        """Return the (ops, tokens, bytes) of a tenant in the queue."""
        row = self.redis.hmget(redis_keys.queue(POOL, TenantId(tenant)), ["ops", "tokens", "bytes"])
        ops, tokens, size = (int(value or 0) for value in row)
        return ops, tokens, size

    def references(self) -> dict[str, int]:
        """Return the number of ops that refer to each spool segment."""
        rows = self.redis.hgetall(redis_keys.spool_segment_refs())
        return {segment.decode(): int(count) for segment, count in rows.items()}

    def everything(self) -> dict[bytes, Any]:
        """Return every key with its value, to prove that a refusal wrote nothing.

        The scheduler's lease is left out, because it expires without a write.
        """
        read = {
            b"string": self.redis.get,
            b"hash": self.redis.hgetall,
            b"set": self.redis.smembers,
            b"zset": lambda key: self.redis.zrange(key, 0, -1, withscores=True),
            b"list": lambda key: self.redis.lrange(key, 0, -1),
        }
        names = set(self.redis.scan_iter()) - {redis_keys.scheduler_lease().encode()}
        return {name: read[self.redis.type(name)](name) for name in names}


@contextlib.asynccontextmanager
async def open_log(
    redis_url: str, data_dir: Path, limits: Quotas | None = None, disk_reserve_bytes: int = 0
) -> AsyncIterator[Log]:
    """Open every role of the store on one Redis, with leadership and a claimed worker id."""
    connection, redis = open_connection(redis_url), open_sync_connection(redis_url)
    writer = new_writer("test")
    spool = Spool(data_dir / "spool", writer)
    results = Spool(data_dir / "spool", RESULTS + writer)
    log = Log(
        redis=redis,
        connection=connection,
        spool=spool,
        results=results,
        intake=Intake(connection, spool, always(limits or Quotas()), disk_reserve_bytes),
        dispatch=Dispatch(connection, "scheduler"),
        execution=Execution(redis, spool, results, POOL, WORKER),
    )
    log.execution.claim()
    log.execution.publish(pool_record_for_tests())
    await log.dispatch.lead()
    try:
        yield log
    finally:
        spool.close()
        results.close()
        redis.close()
        await connection.aclose()
