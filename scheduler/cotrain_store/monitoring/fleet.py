"""Fleet: all pools with their workers and queues, Redis and the scheduler.

Every view is a function of this: status, metrics, autoscaler, readiness and pages. Reads only. Each
pool is read by one pipeline and the script of its queues, so pools may differ by milliseconds.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cotrain_store import redis_keys
from cotrain_store.messages.fleet import Scaling, WorkerExit, WorkerHeartbeat, parse_scaling
from cotrain_store.messages.ids import PoolId, TenantId, WorkerId, decode
from cotrain_store.messages.runs import PoolRecord, pool_record
from cotrain_store.redis_client.connection import Connection, parse_ms
from cotrain_store.redis_client.scripts import async_script

#: Tenants in one call of the script that reads their loads: about 1 ms, in which Redis serves no other client.
TENANTS_AT_ONCE = 500


@dataclass(frozen=True)
class QueueStatus:
    """Unfinished requests of one tenant in one pool."""

    tenant: TenantId
    ops: int
    tokens: int
    bytes: int  # bytes of the ops
    samples_waiting: int = 0
    samples_running: int = 0
    sample_tokens: int = 0  # maximum tokens of those sample requests


def sum_of(queues: Iterable[QueueStatus], tenant: str = "") -> QueueStatus:
    """Return the sum of queues, under the name `tenant`."""
    rows = [(q.ops, q.tokens, q.bytes, q.samples_waiting, q.samples_running, q.sample_tokens) for q in queues]
    return QueueStatus(TenantId(tenant), *map(sum, zip((0,) * 6, *rows, strict=True)))


@dataclass(frozen=True)
class WorkerStatus:
    """One worker id of a pool, with or without a live process."""

    id: WorkerId
    heartbeat: WorkerHeartbeat | None  # None without a live process
    open_steps: int
    drain_asked_at: float | None  # Time when the operator requested its drain, in s since 1970
    is_known: bool  # False if it is not in the pool's list of workers and only has a drain request
    last_exit: WorkerExit | None = None
    """Last crash or refused start; None if there was none, or without a supervisor."""


@dataclass(frozen=True)
class PoolStatus:
    """One pool with its workers and queues."""

    record: PoolRecord
    ids: tuple[WorkerStatus, ...] = ()
    """Worker ids of the pool, sorted, with drained and missing ones."""
    last_cycle: int = 0
    queues: tuple[QueueStatus, ...] = ()
    oldest_ready_s: float = 0.0
    oldest_gap_s: float = 0.0
    oldest_gap_run: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    weights: int = 0  # number of saved weights with a record
    ready_runs: int = 0  # number of runs with a request that can run
    scaling: Scaling | None = None
    """Last decision of the scheduler on the number of workers; None before the first one."""
    paused: frozenset[TenantId] = frozenset()  # paused tenants

    @property
    def workers(self) -> tuple[WorkerHeartbeat, ...]:
        """Heartbeats of the live workers."""
        return tuple(each.heartbeat for each in self._known if each.heartbeat)

    @property
    def workers_known(self) -> int:
        """Number of worker ids, with or without a live process."""
        return len(self._known)

    @property
    def workers_unavailable(self) -> tuple[WorkerId, ...]:
        """Known worker ids whose process gives no heartbeat."""
        return tuple(each.id for each in self._known if each.heartbeat is None)

    @property
    def open_cycles(self) -> int:
        """Number of steps that are planned and not committed."""
        return sum(each.open_steps for each in self._known)

    @property
    def has_worker(self) -> bool:
        """True if a live worker takes requests."""
        return any(not worker.is_handing_over for worker in self.workers)

    @property
    def may_have_none(self) -> bool:
        """True if the operator allows the pool to have no worker (`COTRAIN_WORKERS_MIN=0`)."""
        return self.scaling is not None and self.scaling.bounds.least == 0

    @property
    def backlog_s(self) -> float:
        """Time that the current workers need for the tokens of the tenants that are not paused."""
        tokens = sum(queue.tokens for queue in self.queues if queue.tenant not in self.paused)
        return backlog_seconds(tokens, self._rates, self.record.tokens_per_s)

    def workers_wanted(self, now: float) -> int:
        """Return the wanted number of workers at `now`, in s since 1970: the formula of docs/reference/metrics.md.

        Without a leading scheduler, it is the current number, and at least one if anything waits.
        """
        if self.scaling is not None and self.scaling.is_current(now):
            return self.scaling.wanted
        return max(len(self._rates), min(1, sum(q.ops + q.samples_waiting for q in self.queues)))

    def workers_missing(self, now: float) -> tuple[WorkerId, ...]:
        """Return the known workers without a heartbeat; none if the pool may have no worker and wants no further one."""
        is_current = self.scaling is not None and self.scaling.is_current(now)
        enough = is_current and self.workers_wanted(now) <= len(self._rates)
        return () if self.may_have_none and enough else self.workers_unavailable

    @property
    def duty(self) -> Mapping[str, float]:
        """Shares of the last minute by phase (train, optim, sample, idle), on average of workers."""
        shares = [worker.duty for worker in self.workers if any(worker.duty.values())]
        phases = dict.fromkeys(phase for each in shares for phase in each)
        return {phase: sum(each.get(phase, 0.0) for each in shares) / len(shares) for phase in phases}

    @property
    def _known(self) -> list[WorkerStatus]:
        return [each for each in self.ids if each.is_known]

    @property
    def _rates(self) -> list[float]:
        return [worker.tokens_per_s for worker in self.workers if not worker.is_handing_over]


def backlog_seconds(tokens: int, rates: Sequence[float], measured: float) -> float:
    """Return the time that queued tokens take; `rates` are of live workers, in tokens/s.

    Without a live worker, assume one at the rate `measured` last.
    """
    rate = sum(rates) or measured
    return tokens / rate if rate > 0 else 0.0


@dataclass(frozen=True)
class RedisStatus:
    """State of the Redis under the store."""

    version: str
    appendonly: bool
    appendfsync: str
    aof_bytes: int
    aof_last_write_ok: bool
    memory_bytes: int
    memory_limit_bytes: int = 0  # 0 for no limit
    is_replica: bool = False  # True: it takes no writes
    saves: bool = True
    """False if it is set to write snapshots and the last one failed: it takes no writes then."""


@dataclass(frozen=True)
class Fleet:
    """Pools by base model, with the Redis and the scheduler under them."""

    pools: tuple[PoolStatus, ...]
    redis: RedisStatus
    has_scheduler: bool  # True if a scheduler holds the lease
    scheduler_epoch: int  # fencing number of the newest scheduler

    def unserved(self, base_models: Iterable[str]) -> list[str]:
        """Return the base models without a pool: no worker has served them yet."""
        known = {pool.record.base_model for pool in self.pools}
        return [name for name in base_models if name not in known]


async def read_fleet(connection: Connection, *, with_queues: bool = True) -> Fleet:
    """Read the whole fleet. Without queues it is cheap: the cost of queues grows with tenants."""
    pools, redis, (lease, epoch) = await asyncio.gather(
        read_pools(connection, with_queues=with_queues),
        redis_status(connection),
        connection.mget([redis_keys.scheduler_lease(), redis_keys.scheduler_epoch()]),
    )
    return Fleet(pools, redis, lease is not None, int(epoch or 0))


async def read_pools(
    connection: Connection, tenant: TenantId | None = None, *, with_queues: bool = True
) -> tuple[PoolStatus, ...]:
    """Read all pools, by base model; with the queues of all tenants, of one, or of none."""
    records = map(pool_record, await connection.hvals(redis_keys.pools()))
    in_order = sorted(records, key=lambda record: record.base_model)
    return tuple([await _read(connection, record, tenant, with_queues=with_queues) for record in in_order])


async def pool_status(connection: Connection, pool: PoolId) -> PoolStatus:
    """Read one pool, with the queues of all tenants."""
    record = pool_record(await connection.hget(redis_keys.pools(), pool))
    return await _read(connection, record, None, with_queues=True)


async def _read(
    connection: Connection, record: PoolRecord, tenant: TenantId | None, *, with_queues: bool
) -> PoolStatus:
    pool = record.id
    members, drains = await asyncio.gather(
        connection.smembers(redis_keys.workers(pool)), connection.hgetall(redis_keys.draining(pool))
    )
    ids = sorted(members | drains.keys())
    pipeline = connection.pipeline(transaction=False)
    pipeline.zrange(redis_keys.ready(pool), 0, 0, withscores=True)
    pipeline.zrange(redis_keys.gaps(pool), 0, 0, withscores=True)
    pipeline.get(redis_keys.clock())
    pipeline.get(redis_keys.cycle_counter(pool))
    pipeline.hgetall(redis_keys.counters(pool))
    pipeline.scard(redis_keys.pool_weights(pool))
    pipeline.zcard(redis_keys.ready(pool))
    pipeline.get(redis_keys.scaling(pool))
    pipeline.hkeys(redis_keys.paused_tenants())
    pipeline.hgetall(redis_keys.worker_exits(record.base_model))
    for name in ids:
        worker = WorkerId(name.decode())
        pipeline.get(redis_keys.worker(pool, worker))
        pipeline.hlen(redis_keys.open_steps(pool, worker))
    found = await pipeline.execute()
    ready, gaps, clock, cycle, counters, weights, ready_runs, scaling, paused, exits, *rows = found
    tenants = [tenant] if tenant else await _active_tenants(connection, pool) if with_queues else []
    return PoolStatus(
        record=record,
        ids=tuple(
            WorkerStatus(
                id=WorkerId(name.decode()),
                heartbeat=decode(WorkerHeartbeat, json.loads(row)) if row else None,
                open_steps=open_steps,
                drain_asked_at=float(drains[name]) if name in drains else None,
                is_known=name in members,
                last_exit=decode(WorkerExit, json.loads(exits[name])) if name in exits else None,
            )
            for name, row, open_steps in zip(ids, rows[::2], rows[1::2], strict=True)
        ),
        last_cycle=int(cycle or 0),
        queues=await _queues(connection, pool, tenants),
        oldest_ready_s=_age_s(ready, time.time() * 1000),
        oldest_gap_s=_age_s(gaps, parse_ms(clock)),
        oldest_gap_run=gaps[0][0].decode() if gaps else "",
        counters={name.decode(): float(value) for name, value in counters.items()},
        weights=weights,
        ready_runs=ready_runs,
        scaling=parse_scaling(scaling),
        paused=frozenset(TenantId(name.decode()) for name in paused),
    )


async def _active_tenants(connection: Connection, pool: PoolId) -> list[TenantId]:
    names = await connection.smembers(redis_keys.queue_tenants(pool))
    return sorted(TenantId(name.decode()) for name in names)


async def _queues(connection: Connection, pool: PoolId, tenants: Sequence[TenantId]) -> tuple[QueueStatus, ...]:
    queue_loads = async_script(connection, "queue_loads")
    queues: list[QueueStatus] = []
    for first in range(0, len(tenants), TENANTS_AT_ONCE):
        part = tenants[first : first + TENANTS_AT_ONCE]
        row = await queue_loads({"prefix": redis_keys.prefix(pool), "tenants": part})
        numbers = map(int, json.loads(row))
        queues += map(QueueStatus, part, *[numbers] * 6)
    return tuple(queues)


async def redis_status(connection: Connection) -> RedisStatus:
    """Return the state of Redis."""
    facts = await connection.info()
    fsync = await connection.config_get("appendfsync")
    points = await connection.config_get("save")
    return RedisStatus(
        version=str(facts["redis_version"]),
        appendonly=facts.get("aof_enabled") == 1,
        appendfsync=str(fsync.get("appendfsync", "")),
        aof_bytes=int(facts.get("aof_current_size", 0)),
        aof_last_write_ok=facts.get("aof_last_write_status", "ok") == "ok",
        memory_bytes=int(facts["used_memory"]),
        memory_limit_bytes=int(facts.get("maxmemory", 0)),
        is_replica=facts.get("role", "master") != "master",
        saves=facts.get("rdb_last_bgsave_status", "ok") == "ok" or not points.get("save"),
    )


def _age_s(oldest: list[tuple[bytes, float]], now_ms: float) -> float:
    return max(0.0, (now_ms - oldest[0][1]) / 1000) if oldest else 0.0
