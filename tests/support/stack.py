"""Scheduler and worker in this process, on a real Redis and a tiny real model, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cotrain_scheduler.scheduler import Scheduler
from cotrain_store import redis_keys
from cotrain_store.disk.spool import RESULTS, Spool, new_writer
from cotrain_store.messages.fleet import PlanPolicy
from cotrain_store.messages.ids import RequestId, SessionId, TenantId, WorkerId, run_id
from cotrain_store.messages.ops import OpKind, Result
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.joint_intake import JointIntake
from cotrain_store.redis_client.connection import Connection, open_connection, open_sync_connection
from cotrain_store.results.futures import Futures
from cotrain_store.results.pending import Pending
from cotrain_store.sampling.intake import SampleIntake
from cotrain_store.settings import ClockMode, SchedulerSettings, WorkerSettings, pool_of
from cotrain_store.tenants.quotas import Quotas
from cotrain_store.tenants.records import Records
from cotrain_workers.engine.engine import Engine
from cotrain_workers.engine.spec import lora_widths
from cotrain_workers.recovery.recovery_copies import UNMEASURED, ReplayCost, SnapshotPolicy
from cotrain_workers.worker.bootstrap import Tuning, enter_pool
from cotrain_workers.worker.loop import WorkerLoop
from tests.support.bodies import optim_body, pass_body
from tests.support.limits import always
from tests.support.waiting import until

MODEL = "tiny"
#: Tuning of a worker without arguments.
TUNING = Tuning()
POOL = pool_of(MODEL)
#: Ids of the first and of the second worker of a pool.
OLD, NEW = WorkerId("w0"), WorkerId("w1")


class Home(NamedTuple):
    """Redis and data folder of a pool."""

    redis_url: str
    data_dir: Path


@dataclass
class Stack:
    """API's part of a stack: it accepts requests and reads results. Other processes execute them."""

    redis_url: str
    data_dir: Path
    connection: Connection
    intake: JointIntake
    futures: Futures
    dispatch: Dispatch
    records: Records
    samples: SampleIntake

    async def create(self, tenant: str, session: str, lora: LoraSpec, model_seq: int = 0) -> RunRecord:
        run = RunRecord(
            id=run_id(SessionId(session), model_seq),
            tenant=TenantId(tenant),
            session=SessionId(session),
            pool=POOL,
            base_model=MODEL,
            lora=lora,
            created_at=time.time(),
        )
        await self.intake.create_run(run)
        return run

    async def forward_backward(
        self,
        run: RunRecord,
        seq: int,
        sequences: Sequence[Sequence[int]],
        kind: OpKind = OpKind.FORWARD_BACKWARD,
        policy_step: int | None = None,
    ) -> RequestId:
        body = pass_body(run.id, seq, sequences, forward_only=kind is OpKind.FORWARD, policy_step=policy_step)
        tokens = sum(len(sequence) - 1 for sequence in sequences)
        return await self.intake.submit(run, seq, kind, body, tokens, digest=f"{seq}")

    async def optim_step(self, run: RunRecord, seq: int, lr: float = 1e-2) -> RequestId:
        return await self.intake.submit(
            run, seq, OpKind.OPTIM_STEP, optim_body(lr, run.lora.optimizer), 0, digest=f"{seq}"
        )

    async def result(self, run: RunRecord, request: RequestId, timeout_s: float = 300) -> Result:
        result = await self.futures.wait(run.tenant, request, timeout_s)
        assert not isinstance(result, Pending), f"{request} did not resolve: {result}"
        return result


@contextlib.asynccontextmanager
async def stack(
    redis_url: str,
    data_dir: Path,
    mode: ClockMode = ClockMode.EAGER,
    period_s: float = 10.0,
    limits: Quotas | None = None,
    **scheduling: float,
) -> AsyncIterator[Stack]:
    """Run the API's store objects and a scheduler. A worker is started separately (`worker`)."""
    settings = SchedulerSettings.model_validate(
        {
            "redis_url": redis_url, "data_dir": data_dir, "clock_mode": mode,
            "clock_period_s": period_s, **scheduling,
        }
    )  # fmt: skip
    async with accepting(redis_url, data_dir, limits) as accepted:
        clock = Scheduler(accepted.dispatch, settings)
        ticking = asyncio.create_task(clock.run())
        yield accepted
        clock.stop()
        await ticking


@contextlib.asynccontextmanager
async def accepting(redis_url: str, data_dir: Path, limits: Quotas | None = None) -> AsyncIterator[Stack]:
    """Open the API's store objects. Other processes do the rest."""
    connection, spool = open_connection(redis_url), Spool(data_dir / "spool", new_writer("api"))
    async with Futures(connection, spool) as futures:
        yield Stack(
            redis_url,
            data_dir,
            connection,
            JointIntake(connection, spool, always(limits or Quotas())),
            futures,
            Dispatch(connection, new_writer("scheduler")),
            Records(connection),
            SampleIntake(connection, spool, always(Quotas())),
        )
    spool.close()
    await connection.aclose()


@contextlib.contextmanager
def worker(
    home: Stack | Home,
    engine: Engine,
    *,
    drains: bool = True,
    tuning: Tuning = TUNING,
    cost: ReplayCost = UNMEASURED,
    **overrides: float | str,
) -> Iterator[WorkerLoop]:
    """Run a worker's loop in a thread until the end of the block. With `drains`, it writes snapshots at its end."""
    loop, opened = make_worker(home, engine, tuning, cost, **overrides)
    if not drains:
        loop._runs.copies.drain = lambda deadline_s: None  # type: ignore[method-assign]  # like a kill
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join()
        opened.close()


def make_worker(
    home: Stack | Home, engine: Engine, tuning: Tuning = TUNING, cost: ReplayCost = UNMEASURED, **overrides: float | str
) -> tuple[WorkerLoop, contextlib.ExitStack]:
    """Build a worker's loop without running it. Return it with its open resources, which the caller must close."""
    settings = WorkerSettings.model_validate(
        {
            "redis_url": home.redis_url, "data_dir": home.data_dir,
            "base_model": MODEL, "worker_id": OLD, **overrides,
        }
    )  # fmt: skip
    opened = contextlib.ExitStack()
    connection = opened.enter_context(open_sync_connection(home.redis_url))
    writer = new_writer("w0")
    spools = settings.open_spool(writer), settings.open_spool(RESULTS + writer)
    for spool in spools:
        opened.callback(spool.close)
    record = replace(
        pool_record_for_tests(), numerics_id=engine.facts.numerics_id, lora_widths=lora_widths(engine.targets)
    )
    return enter_pool(engine, connection, spools, record, settings, None, tuning, cost), opened


def snapshots(**policy: float) -> Tuning:
    """Return a tuning with this snapshot policy (`SnapshotPolicy`)."""
    return replace(TUNING, snapshots=SnapshotPolicy(**policy))  # type: ignore[arg-type]  # one is an int


def pool_record_for_tests() -> PoolRecord:
    """Return the record of a pool with a tiny model."""
    return PoolRecord(
        id=POOL,
        base_model=MODEL,
        architecture="Qwen3ForCausalLM",
        vocab_size=512,
        context_length=2048,
        max_rank=64,
        num_parameters=1,
        device="cpu",
        dtype="float32",
        numerics_id="",
        tokens_per_s=1e5,
    )


async def policy_was_read(server: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until the scheduler has read weights and pauses again. A read in progress does not count."""
    passed: list[PlanPolicy] = []
    read = server.dispatch.policy

    async def recorded() -> PlanPolicy:
        passed.append(await read())
        return passed[-1]

    monkeypatch.setattr(server.dispatch, "policy", recorded)
    await until(lambda: len(passed) > 1)


def heartbeat(redis: Any, name: WorkerId) -> dict[str, Any]:
    """Return the heartbeat of a worker, or an empty dict if it has none."""
    row = redis.get(redis_keys.worker(POOL, name))
    return json.loads(row) if row else {}


def is_listed(redis: Any, name: WorkerId) -> bool:
    """Return True if a worker is registered in its pool."""
    return bool(redis.sismember(redis_keys.workers(POOL), name))
