"""Read what is ready and write plans: the scheduler's side of the log.

Only the holder of the newest epoch may write; an older one gets Fenced, and stands by.

Strike idle tenants off a pool's list. Whatever ends work does so at once; an older version never did.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from cotrain_store.errors import Fenced, PlanOutdated
from cotrain_store.keys import fleet_keys, result_keys, run_keys
from cotrain_store.messages.fleet import PlanPolicy, WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.gaps import client_seq, given_up
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId, decode, encode
from cotrain_store.messages.ops import QueueChanges, QueuedOp, RunQueue, Step, Wake
from cotrain_store.messages.results import Result
from cotrain_store.monitoring.scaling import ScalingRecords
from cotrain_store.oplog.intake import rejection
from cotrain_store.oplog.moves import Moves
from cotrain_store.redis_client.connection import Connection, SyncConnection, clock_ms
from cotrain_store.redis_client.scripts import async_script, sync_script
from cotrain_store.sampling.endings import CANCEL, TTL_MS
from cotrain_store.tenants.policies import read_pauses, read_weights

#: Runs that one call reads: Redis does nothing else during it.
RUNS_AT_ONCE = 256
#: Ops read of a run: more than a cycle can hold. What is behind them is read when these are planned.
MAX_OPS_PER_RUN = 64
#: The store's clock goes on by at most this at once.
MAX_STEP_S = 10.0
#: Keys that end by one call; Redis does nothing else during it. Others are served between the
#: calls of one second, which end more than a store can accept in that time.
ENDS_AT_ONCE = 1_000
_CALLS_AT_ONCE = 10
#: A step is planned when its worker is free: planning ahead would only fix the order too early.
MAX_OPEN_STEPS = 1


class Dispatch:
    """One scheduler's access to every pool, under its lease."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._redis = connection
        self._name = name
        self._epoch = ""
        self._ready = async_script(connection, "ready")
        self._changes = async_script(connection, "changes")
        self._plan = async_script(connection, "plan")
        self._lease = async_script(connection, "lease")
        self._reassign = async_script(connection, "reassign")
        self._deregister = async_script(connection, "deregister")
        self._expire_gap = async_script(connection, "expire_gap")
        self._tick = async_script(connection, "tick")
        self.moves = Moves(connection)
        self.scalings = ScalingRecords(connection)
        self._counted_at: float | None = None

    @property
    def epoch(self) -> int:
        """The epoch of this scheduler; 0 before it ever led."""
        return int(self._epoch or 0)

    async def lead(self) -> bool:
        """Take or renew the lease; False while another scheduler holds it."""
        script_keys = [fleet_keys.scheduler_lease(), fleet_keys.scheduler_epoch()]
        args = {"name": self._name, "ttl_ms": fleet_keys.LEASE_TTL_MS, "epoch": self._epoch}
        answer = await self._lease(script_keys, args)
        if not answer:
            self._counted_at = None
            return False
        self._epoch = answer.decode()
        return True

    async def pass_time(self) -> None:
        """Let the store's clock go on by what passed since the last call, and end what is due by it.

        At most MAX_STEP_S: of a time without a scheduler, or without a Redis, no client could make use.

        Raises:
            Fenced: a newer scheduler leads.
        """
        now = time.monotonic()
        passed_s = min(now - (now if self._counted_at is None else self._counted_at), MAX_STEP_S)
        script_keys = [fleet_keys.scheduler_epoch(), result_keys.clock(), result_keys.ends()]
        for passed_ms in (int(passed_s * 1000), *([0] * (_CALLS_AT_ONCE - 1))):
            args = {"epoch": self._epoch, "passed_ms": passed_ms, "most": ENDS_AT_ONCE}
            ended = await self._tick(script_keys, args)
            if ended == b"FENCED":
                raise Fenced
            self._counted_at = now
            if ended < ENDS_AT_ONCE:
                return

    async def resign(self) -> None:
        """Give the lease back, so that the next scheduler need not wait for it to run out."""
        if await self._redis.get(fleet_keys.scheduler_lease()) == self._name.encode():
            await self._redis.delete(fleet_keys.scheduler_lease())

    async def pools(self) -> list[PoolId]:
        """List the pools there are."""
        return sorted(PoolId(name.decode()) for name in await self._redis.hkeys(fleet_keys.pools()))

    async def policy(self) -> PlanPolicy:
        """Read who is held back, and the weights of tenants."""
        return PlanPolicy(await read_weights(self._redis), await read_pauses(self._redis))

    async def base_model(self, pool: PoolId) -> str:
        """Name the base model of a pool."""
        return str(json.loads(await self._redis.hget(fleet_keys.pools(), pool))["base_model"])

    async def worker_slots(self, pool: PoolId) -> list[WorkerSlot]:
        """List the worker ids of a pool, also those that no process has had for a while."""
        ids = sorted(
            WorkerId(n.decode()) for n in await self._redis.smembers(fleet_keys.workers(pool))
        )
        pipeline = self._redis.pipeline(transaction=False)
        for worker in ids:
            pipeline.get(fleet_keys.worker_epoch(pool, worker))
            pipeline.get(fleet_keys.worker(pool, worker))
        rows = await pipeline.execute()
        return [
            WorkerSlot(worker, int(epoch or 0), _heartbeat(row) if row else None)
            for worker, epoch, row in zip(ids, rows[::2], rows[1::2], strict=True)
        ]

    async def reassign(self, pool: PoolId, dead: WorkerSlot, successor: WorkerId) -> bool:
        """Give what a dead worker had to another one; its runs but those at work can go anywhere.

        Should its last process still live, it can write nothing any more. False if it lives
        again, or the successor does not: nothing was written.

        Raises:
            Fenced: a newer scheduler leads.
        """
        script_keys = [
            fleet_keys.scheduler_epoch(), fleet_keys.workers(pool),
            fleet_keys.worker_epoch(pool, dead.worker), fleet_keys.worker(pool, dead.worker),
            fleet_keys.worker(pool, successor), result_keys.spool_segment_refs(),
            result_keys.notify_results(), fleet_keys.counters(pool),
        ]  # fmt: skip
        args = {
            "epoch": self._epoch, "prefix": fleet_keys.prefix(pool), "dead": dead.worker,
            "seen_epoch": str(dead.epoch), "successor": successor,
            "any_worker": run_keys.ANY_WORKER, "cancel": CANCEL, "lives": TTL_MS,
        }  # fmt: skip
        answer = await self._reassign(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"OK")

    async def deregister(self, pool: PoolId, drained: WorkerSlot, successor: WorkerId) -> bool:
        """Take a drained worker off its pool's list: its runs can go anywhere. False where it is not yet drained.

        Raises:
            Fenced: a newer scheduler leads.
        """
        script_keys = [
            fleet_keys.scheduler_epoch(), fleet_keys.workers(pool),
            fleet_keys.worker_epoch(pool, drained.worker), fleet_keys.draining(pool),
            fleet_keys.worker(pool, successor),
        ]  # fmt: skip
        args = {
            "epoch": self._epoch, "prefix": fleet_keys.prefix(pool), "worker": drained.worker,
            "seen_epoch": str(drained.epoch), "successor": successor,
            "any_worker": run_keys.ANY_WORKER,
        }  # fmt: skip
        answer = await self._deregister(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"OK")

    async def ask_move(self, pool: PoolId, run: RunId, to: WorkerId) -> bool:
        """Have a run go to another worker; False where that can not be, or it was moved not long ago.

        Raises:
            Fenced: a newer scheduler leads.
        """
        return await self.moves.request_move(pool, run, to, self._epoch)

    async def open_steps(self, pool: PoolId, worker: WorkerId) -> int:
        """Count a worker's steps that are planned and not yet committed."""
        return int(await self._redis.hlen(fleet_keys.open_steps(pool, worker)))

    async def ready(self, pool: PoolId) -> list[RunQueue]:
        """Read all runs that can go on, those that waited longest first; not at one moment."""
        found = await self._redis.zrange(run_keys.ready(pool), 0, -1)
        return [queue for queue in await self.queues(pool, _run_ids(found)) if queue.ops]

    async def queues(self, pool: PoolId, runs: Sequence[RunId]) -> list[RunQueue]:
        """Read the queues of these runs; without ops where a run can not go on."""
        queues: list[RunQueue] = []
        for first in range(0, len(runs), RUNS_AT_ONCE):
            args = {
                "prefix": fleet_keys.prefix(pool), "max_ops_per_run": MAX_OPS_PER_RUN,
                "runs": runs[first : first + RUNS_AT_ONCE],
            }  # fmt: skip
            queues += [_run_queue(row) for row in await self._ready([], args)]
        return queues

    async def changes(self, pool: PoolId, since: int) -> QueueChanges:
        """Read what changed since a number, or the oldest part of it; twice gives the same, or more."""
        script_keys = [run_keys.changed(pool), run_keys.change_counter(pool), run_keys.ready(pool)]
        args = {
            "prefix": fleet_keys.prefix(pool), "since": since,
            "max_runs": RUNS_AT_ONCE, "max_ops_per_run": MAX_OPS_PER_RUN,
        }  # fmt: skip
        number, are_all, ready, rows = await self._changes(script_keys, args)
        return QueueChanges(int(number), [_run_queue(row) for row in rows], ready, bool(are_all))

    async def last_change(self, pool: PoolId) -> int:
        """Read the number of the last change: what comes later can be asked for."""
        return int(await self._redis.get(run_keys.change_counter(pool)) or 0)

    async def last_cycle(self, pool: PoolId) -> int:
        """Read the number of the pool's last cycle; 0 before the first."""
        return int(await self._redis.get(fleet_keys.cycle_counter(pool)) or 0)

    async def plan(self, pool: PoolId, step: Step, seen: int = 0) -> None:
        """Write a step; it is then fixed, whatever dies. The worker is woken.

        Changes of the queue up to the number `seen` need not be kept any longer.

        Raises:
            Fenced: a newer scheduler leads.
            PlanOutdated: the queue changed since it was read; nothing was written.
        """
        script_keys = [
            fleet_keys.scheduler_epoch(), fleet_keys.cycle_counter(pool),
            fleet_keys.open_steps(pool, step.worker), run_keys.ready(pool), run_keys.gaps(pool),
            fleet_keys.notify_worker(pool, step.worker), run_keys.changed(pool),
        ]  # fmt: skip
        args = {
            "epoch": self._epoch, "prefix": fleet_keys.prefix(pool), "worker": step.worker,
            "cycle": step.cycle, "max_open": MAX_OPEN_STEPS, "runs": _runs_of(step.ops),
            "planned_ms": int(step.planned_at * 1000), "seen": seen,
        }  # fmt: skip
        answer = await self._plan(script_keys, args, encode(step))
        if answer == b"FENCED":
            raise Fenced
        if answer == b"OUTDATED":
            raise PlanOutdated

    async def old_gaps(self, pool: PoolId, older_than_s: float) -> list[tuple[RunId, TenantId]]:
        """List the runs that hold ops behind a seq missing for longer than that."""
        latest = await clock_ms(self._redis) - older_than_s * 1000
        runs = await self._redis.zrangebyscore(run_keys.gaps(pool), 0, latest)
        tenants = [
            await self._redis.hget(run_keys.log(pool, RunId(r.decode())), "tenant") for r in runs
        ]
        return [
            (RunId(run.decode()), TenantId(tenant.decode()))
            for run, tenant in zip(runs, tenants, strict=True)
            if tenant
        ]

    async def expire_gap(self, pool: PoolId, run: RunId, tenant: TenantId) -> None:
        """Fail what waits behind a seq that never came; the gap itself is not skipped.

        What fails counts in no queue any more, until the missing request comes after all.

        Raises:
            Fenced: a newer scheduler leads.
        """
        missing = int(await self._redis.hget(run_keys.log(pool, run), "next") or 0)
        message = given_up(await client_seq(self._redis, pool, run, missing))
        script_keys = [
            fleet_keys.scheduler_epoch(), run_keys.gaps(pool), run_keys.log(pool, run),
            run_keys.ops(pool, run), run_keys.bodies(pool, run), result_keys.spool_segment_refs(),
            run_keys.queue(pool, tenant), result_keys.notify_results(),
        ]  # fmt: skip
        args = {
            "epoch": self._epoch, "run": run, "missing": missing,
            "tenant": tenant, "prefix": fleet_keys.prefix(pool),
            "failure": rejection(run, Result.failed(message, "server")),
        }  # fmt: skip
        if await self._expire_gap(script_keys, args) == b"FENCED":
            raise Fenced

    async def wakes(self) -> AsyncIterator[Wake | None]:
        """Yield what wakes the scheduler, and None once it listens: what came before is lost."""
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(fleet_keys.notify_scheduler())
            async for message in subscription.listen():
                yield (
                    None if message["type"] == "subscribe" else Wake.parse(message["data"].decode())
                )


def _heartbeat(row: bytes) -> WorkerHeartbeat:
    return decode(WorkerHeartbeat, json.loads(row))


def _run_ids(names: Sequence[bytes]) -> list[RunId]:
    return [RunId(name.decode()) for name in names]


def _run_queue(row: Sequence[bytes]) -> RunQueue:
    run, tenant, worker, first, begun, *envelopes = (field.decode() for field in row)
    ops = tuple(
        QueuedOp.parse(RunId(run), int(first) + offset, envelope)
        for offset, envelope in enumerate(envelopes)
    )
    at = WorkerId(worker) if worker else None
    return RunQueue(RunId(run), TenantId(tenant), at, ops, int(begun))


def _runs_of(ops: Sequence[QueuedOp]) -> list[dict[str, Any]]:
    """Sum a step up: of each of its runs the first seq, and its ops as the log has them."""
    runs: dict[RunId, dict[str, Any]] = {}
    for op in ops:
        run = runs.setdefault(op.run, {"run": op.run, "first": op.seq, "ops": []})
        run["ops"].append(op.envelope())
    return list(runs.values())


#: Redis does nothing else while it looks at these.
TENANTS_AT_ONCE = 1_000


def strike_idle_tenants(connection: SyncConnection, pool: PoolId) -> None:
    """Leave on the list only those for which something waits or runs. Twice is harmless."""
    strike, prefix = sync_script(connection, "idle_tenants"), fleet_keys.prefix(pool)
    cursor = None
    while cursor != 0:
        cursor, names = connection.sscan(
            run_keys.queue_tenants(pool), cursor or 0, count=TENANTS_AT_ONCE
        )
        strike([], {"prefix": prefix, "tenants": [name.decode() for name in names]})
