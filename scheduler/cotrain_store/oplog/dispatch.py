"""The scheduler's side of the log: reads of runnable work, writes of plans, and the store's clock.

Only the holder of the newest epoch may write. An older scheduler gets Fenced and stands by.
"""

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.disk.stored_results import CANCEL, TTL_MS
from cotrain_store.errors import PlanOutdated
from cotrain_store.messages.fleet import Move, Pauses, PlanPolicy, Scaling, WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WorkerId, decode, encode
from cotrain_store.messages.ops import PoolView, QueuedOp, Result, RunQueue, Step, Wake
from cotrain_store.monitoring.fleet import PoolStatus, pool_status
from cotrain_store.oplog.commit_rows import rejection
from cotrain_store.oplog.moves import Moves
from cotrain_store.redis_client.connection import Connection, clock_ms, replies
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.results.queue_notice import client_seq, given_up
from cotrain_store.tenants.policies import read_policy

#: Maximum number of runs read by one call; it blocks Redis.
RUNS_AT_ONCE = 256
#: Maximum number of ops read of a run: more than a cycle can hold. Later ops are read when these
#: are planned.
MAX_OPS_PER_RUN = 64
#: Maximum number of ready runs checked for a pause. Further ones count as not paused.
RUNS_READ = 1_000
#: Maximum advance of the store's clock at once, in s.
MAX_STEP_S = 10.0
#: Maximum number of keys expired by one call; it blocks Redis. Redis serves other clients between
#: the calls of one second, which expire more keys than a store can accept in that time.
ENDS_AT_ONCE = 1_000
_CALLS_AT_ONCE = 10
#: A step is planned when its worker is free: earlier planning would only fix the order too early.
MAX_OPEN_STEPS = 1


class Dispatch:
    """Access of one scheduler to every pool, under its lease.

    Methods that write raise Fenced if a newer scheduler leads.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._redis = connection
        self._name = name
        self._epoch = ""
        self._view = async_script(connection, "view")
        self._plan = async_script(connection, "plan")
        self._lease = async_script(connection, "lease")
        self._reassign = async_script(connection, "reassign")
        self._deregister = async_script(connection, "deregister")
        self._expire_gap = async_script(connection, "expire_gap")
        self._tick = async_script(connection, "tick")
        self.moves = Moves(connection)
        self._scaling = async_script(connection, "scaling")
        self._counted_at: float | None = None

    @property
    def epoch(self) -> int:
        """Epoch of this scheduler; 0 before it first leads."""
        return int(self._epoch or 0)

    @property
    def _own(self) -> dict[str, str]:
        """Arguments of a script that only the leader may run."""
        return {"fence": redis_keys.scheduler_epoch(), "epoch": self._epoch}

    async def lead(self) -> bool:
        """Acquire or renew the lease. Return False while another scheduler holds it."""
        args = {"lease": redis_keys.scheduler_lease(), "name": self._name, "ttl_ms": redis_keys.LEASE_TTL_MS}
        answer = await self._lease({**self._own, **args})
        if not answer:
            self._counted_at = None
            return False
        self._epoch = answer.decode()
        return True

    async def pass_time(self) -> None:
        """Advance the store's clock by the time since the last call, and expire the keys that are due.

        It advances by at most MAX_STEP_S: clients could not use the time without a scheduler or without Redis.
        """
        now = time.monotonic()
        passed_s = min(now - (now if self._counted_at is None else self._counted_at), MAX_STEP_S)
        for passed_ms in (int(passed_s * 1000), *([0] * (_CALLS_AT_ONCE - 1))):
            args = {"passed_ms": passed_ms, "most": ENDS_AT_ONCE}
            ended = await self._tick({**self._own, **args})
            self._counted_at = now
            if ended < ENDS_AT_ONCE:
                return

    async def resign(self) -> None:
        """Release the lease, so that the next scheduler does not wait for its expiry."""
        if await self._redis.get(redis_keys.scheduler_lease()) == self._name.encode():
            await self._redis.delete(redis_keys.scheduler_lease())

    async def pools(self) -> list[PoolId]:
        """Return the pools of this store."""
        return sorted(PoolId(name.decode()) for name in await self._redis.hkeys(redis_keys.pools()))

    async def policy(self) -> PlanPolicy:
        """Return the pauses, and the weights of tenants."""
        return await read_policy(self._redis)

    async def base_model(self, pool: PoolId) -> str:
        """Return the base model of a pool."""
        return str(json.loads(await self._redis.hget(redis_keys.pools(), pool))["base_model"])

    async def status(self, pool: PoolId) -> PoolStatus:
        """Return the status of a pool, with its last scaling decision."""
        return await pool_status(self._redis, pool)

    async def paused_runs(self, pool: PoolId, pauses: Pauses) -> int:
        """Return the number of ready runs that are paused, or whose tenants are."""
        if not pauses.tenants and not pauses.runs:
            return 0
        ready = await self._redis.zrange(redis_keys.ready(pool), 0, RUNS_READ - 1)
        runs = [RunId(name.decode()) for name in ready]
        tenants = await replies(self._redis, (("HGET", redis_keys.log(pool, run), "tenant") for run in runs))
        return sum(
            run in pauses.runs or (tenant or b"").decode() in pauses.tenants
            for run, tenant in zip(runs, tenants, strict=True)
        )

    async def write_scaling(self, pool: PoolId, scaling: Scaling) -> None:
        """Store the decision for all API processes, and for the next scheduler."""
        await self._scaling({**self._own, "prefix": redis_keys.prefix(pool)}, encode(scaling))

    async def reassign(self, pool: PoolId, dead: WorkerSlot, successor: WorkerId) -> bool:
        """Transfer the work of a dead worker to another one. Its runs may go anywhere, except those in a step.

        If its last process still runs, it is fenced and can write nothing. Return False, with
        nothing written, if the worker is alive again or the successor is not.
        """
        args = {
            **self._own, "prefix": redis_keys.prefix(pool), "dead": dead.worker,
            "seen_epoch": str(dead.epoch), "successor": successor,
            "any_worker": redis_keys.ANY_WORKER, "cancel": CANCEL, "lives": TTL_MS,
        }  # fmt: skip
        return bool(await self._reassign(args) == b"OK")

    async def deregister(self, pool: PoolId, drained: WorkerSlot, successor: WorkerId) -> bool:
        """Remove a drained worker from its pool's list, so that its runs can go anywhere.

        Return False if it is not yet drained.
        """
        args = {
            **self._own, "prefix": redis_keys.prefix(pool), "worker": drained.worker,
            "seen_epoch": str(drained.epoch), "successor": successor,
            "any_worker": redis_keys.ANY_WORKER,
        }  # fmt: skip
        return bool(await self._deregister(args) == b"OK")

    async def request_move(self, pool: PoolId, run: RunId, to: WorkerId) -> bool:
        """Request the move of a run. Return False if it is impossible or the run was moved recently."""
        return await self.moves.request_as_leader(pool, run, to, self._own)

    async def ready(self, pool: PoolId) -> list[RunQueue]:
        """Return all runnable runs, longest waiting first. The read is not atomic."""
        found = await self._redis.zrange(redis_keys.ready(pool), 0, -1)
        runs, queues = [RunId(name.decode()) for name in found], list[RunQueue]()
        for first in range(0, len(runs), RUNS_AT_ONCE):
            queues += (await self.view(pool, runs=runs[first : first + RUNS_AT_ONCE])).queues
        return [queue for queue in queues if queue.ops]

    async def view(self, pool: PoolId, since: int | None = None, runs: Sequence[RunId] = ()) -> PoolView:
        """Return the state of a pool, with the changes since a number, or the oldest part of them.

        Without a number it contains no changes. A repeated call returns the same changes or more.
        It also contains the queues of `runs`, at most RUNS_AT_ONCE of them.
        """
        args = {
            "prefix": redis_keys.prefix(pool), "since": "+inf" if since is None else str(since),
            "runs": list(runs[:RUNS_AT_ONCE]),
            "max_runs": RUNS_AT_ONCE, "max_ops_per_run": MAX_OPS_PER_RUN,
        }  # fmt: skip
        number, is_complete, ready, cycle, slots, moves, rows = await self._view(args)
        return PoolView(
            int(number), [_run_queue(row) for row in rows], bool(is_complete), ready, int(cycle),
            moves=[Move.parse(*row) for row in zip(moves[::2], moves[1::2], strict=True)],
            slots=[_worker_slot(row) for row in sorted(slots)],
        )  # fmt: skip

    async def plan(self, pool: PoolId, step: Step, seen: int = 0) -> None:
        """Write a step and wake the worker. Once written, the step stays fixed through any crash.

        Changes of the queue up to the number `seen` are deleted.

        Raises PlanOutdated if the queue changed since it was read; nothing was written.
        """
        args = {
            **self._own, "prefix": redis_keys.prefix(pool), "worker": step.worker,
            "cycle": step.cycle, "max_open": MAX_OPEN_STEPS, "runs": _runs_of(step.ops),
            "planned_ms": int(step.planned_at * 1000), "seen": seen,
        }  # fmt: skip
        if await self._plan(args, encode(step)) == b"OUTDATED":
            raise PlanOutdated

    async def old_gaps(self, pool: PoolId, older_than_s: float) -> list[tuple[RunId, TenantId]]:
        """Return the runs that hold ops behind a seq missing for longer than this."""
        latest = await clock_ms(self._redis) - older_than_s * 1000
        runs = await self._redis.zrangebyscore(redis_keys.gaps(pool), 0, latest)
        tenants = await replies(
            self._redis, (("HGET", redis_keys.log(pool, RunId(r.decode())), "tenant") for r in runs)
        )
        return [
            (RunId(run.decode()), TenantId(tenant.decode()))
            for run, tenant in zip(runs, tenants, strict=True)
            if tenant
        ]

    async def expire_gap(self, pool: PoolId, run: RunId, tenant: TenantId) -> None:
        """Fail the ops behind a seq that never arrived. The gap itself is not skipped.

        The failed ops no longer count in any queue, unless the missing request arrives later.
        """
        missing = int(await self._redis.hget(redis_keys.log(pool, run), "next") or 0)
        message = given_up(await client_seq(self._redis, pool, run, missing))
        args = {
            **self._own, "run": run, "missing": missing, "tenant": tenant, "prefix": redis_keys.prefix(pool),
            "failure": rejection(run, Result.failed(message, "server")),
        }  # fmt: skip
        await self._expire_gap(args)

    async def wakes(self) -> AsyncIterator[Wake | None]:
        """Yield the wake-ups of the scheduler, and None once it listens. Earlier wake-ups are lost."""
        async with self._redis.pubsub() as subscription:
            await subscription.subscribe(redis_keys.notify_scheduler())
            async for message in subscription.listen():
                yield (None if message["type"] == "subscribe" else Wake.parse(message["data"].decode()))


def _worker_slot(row: tuple[bytes, bytes, bytes, int]) -> WorkerSlot:
    worker, epoch, published, open_steps = row
    heartbeat = decode(WorkerHeartbeat, json.loads(published)) if published else None
    return WorkerSlot(WorkerId(worker.decode()), int(epoch), heartbeat, open_steps)


def _run_queue(row: Sequence[bytes]) -> RunQueue:
    run, tenant, worker, first, begun, *envelopes = (field.decode() for field in row)
    ops = tuple(QueuedOp.parse(RunId(run), int(first) + offset, envelope) for offset, envelope in enumerate(envelopes))
    at = WorkerId(worker) if worker else None
    return RunQueue(RunId(run), TenantId(tenant), at, ops, int(begun))


def _runs_of(ops: Sequence[QueuedOp]) -> list[dict[str, Any]]:
    """Return the first seq of each run in a step, and its ops as the log has them."""
    runs: dict[RunId, dict[str, Any]] = {}
    for op in ops:
        run = runs.setdefault(op.run, {"run": op.run, "first": op.seq, "ops": []})
        run["ops"].append(op.envelope())
    return list(runs.values())
