"""What operators and dashboards see: workers, queues, cycles, Redis. Reads only."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cotrain_store.keys import age_keys, fleet_keys, run_keys, tenant_keys, weights_keys
from cotrain_store.messages.encoding import decode
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, SessionId, TenantId, WorkerId
from cotrain_store.messages.scaling import parse_scaling
from cotrain_store.monitoring.backlog import backlog_seconds
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.redis_client.store_clock import parse_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cotrain_store.messages.scaling import Scaling
    from cotrain_store.redis_client.connection import Connection

#: Cycle records of a full pool have some 10 KB each, and Redis does nothing else while it sends them.
READ_AT_ONCE = 50
#: A script reads the loads of so many tenants, some 1 ms; between two of them others have their turn.
TENANTS_AT_ONCE = 500


@dataclass(frozen=True)
class QueueStatus:
    """What one tenant has accepted and not yet got back in one pool."""

    tenant: TenantId
    ops: int
    tokens: int
    bytes: int
    """Of the ops."""
    samples_waiting: int = 0
    samples_running: int = 0


@dataclass(frozen=True)
class PoolStatus:
    """One pool at a glance."""

    pool: PoolId
    workers: tuple[WorkerHeartbeat, ...]
    workers_known: int
    workers_unavailable: tuple[WorkerId, ...]
    """Known worker ids whose process gives no heartbeat."""
    open_cycles: int
    last_cycle: int
    queues: tuple[QueueStatus, ...]
    oldest_ready_s: float
    oldest_gap_s: float
    counters: Mapping[str, float]
    weights: int = 0
    """Saved weights of which there is a record."""
    measured_tokens_per_s: float = 0.0
    """Of a worker, when the last one started."""
    ready_runs: int = 0
    """With a request that can be run."""
    scaling: Scaling | None = None
    """What the scheduler decided of the number of workers; None before the first time."""
    paused: frozenset[TenantId] = frozenset()
    """Tenants that are held back."""

    @property
    def backlog_s(self) -> float:
        """What waits in these queues, but for those that are held back, as time of the workers there are."""
        return backlog_seconds(self._tokens, self._rates, self.measured_tokens_per_s)

    def workers_wanted(self, now: float) -> int:
        """Count the workers that this pool is to have, `now` in s since 1970: docs/metrics.md has the formula.

        Without a scheduler that leads, as many as there are, and one at least where something waits.
        """
        if self.scaling is not None and self.scaling.is_current(now):
            return self.scaling.wanted
        return max(len(self._rates), min(1, sum(q.ops + q.samples_waiting for q in self.queues)))

    def workers_missing(self, now: float) -> tuple[WorkerId, ...]:
        """Name the known workers without a heartbeat, but for those of a pool that may have none and wants no more."""
        scaling = self.scaling
        may_be_none = scaling is not None and scaling.is_current(now) and scaling.bounds.least == 0
        enough = may_be_none and self.workers_wanted(now) <= len(self._rates)
        return () if enough else self.workers_unavailable

    @property
    def duty(self) -> Mapping[str, float]:
        """What part of the last minute the devices did what (train, optim, sample, idle), on average."""
        shares = [worker.duty for worker in self.workers if any(worker.duty.values())]
        phases = dict.fromkeys(phase for each in shares for phase in each)
        return {
            phase: sum(each.get(phase, 0.0) for each in shares) / len(shares) for phase in phases
        }

    @property
    def _tokens(self) -> int:
        return sum(queue.tokens for queue in self.queues if queue.tenant not in self.paused)

    @property
    def _rates(self) -> list[float]:
        return [worker.tokens_per_s for worker in self.workers if not worker.hands_over]


@dataclass(frozen=True)
class RedisStatus:
    """How the Redis under everything is doing."""

    version: str
    appendonly: bool
    appendfsync: str
    aof_bytes: int
    aof_last_write_ok: bool
    memory_bytes: int
    memory_limit_bytes: int = 0
    """0: none."""
    is_replica: bool = False
    """It takes no writes then."""
    saves: bool = True
    """Where it is set to write snapshots: whether the last one succeeded. It takes no writes otherwise."""


async def pool_status(
    connection: Connection, pool: PoolId, tenant: TenantId | None = None
) -> PoolStatus:
    """Read one pool's status: with the queues of all tenants for which something waits or runs, or of one."""
    ids = sorted(WorkerId(n.decode()) for n in await connection.smembers(fleet_keys.workers(pool)))
    tenants = [tenant] if tenant else await _active_tenants(connection, pool)
    pipeline = connection.pipeline(transaction=False)
    pipeline.zrange(run_keys.ready(pool), 0, 0, withscores=True)
    pipeline.zrange(run_keys.gaps(pool), 0, 0, withscores=True)
    pipeline.get(age_keys.clock())
    pipeline.get(fleet_keys.cycle_counter(pool))
    pipeline.hgetall(fleet_keys.counters(pool))
    pipeline.scard(weights_keys.pool_weights(pool))
    pipeline.hget(fleet_keys.pools(), pool)
    pipeline.zcard(run_keys.ready(pool))
    pipeline.get(fleet_keys.scaling(pool))
    pipeline.hkeys(tenant_keys.paused_tenants())
    for worker in ids:
        pipeline.get(fleet_keys.worker(pool, worker))
        pipeline.hlen(fleet_keys.open_steps(pool, worker))
    found = await pipeline.execute()
    ready, gaps, clock, cycle, counters, weights, record, ready_runs, scaling, paused, *rows = found
    heartbeats, opened = rows[::2], rows[1::2]
    return PoolStatus(
        pool=pool,
        workers=tuple(
            decode(WorkerHeartbeat, json.loads(heartbeat)) for heartbeat in heartbeats if heartbeat
        ),
        workers_known=len(ids),
        workers_unavailable=tuple(
            worker for worker, heartbeat in zip(ids, heartbeats, strict=True) if heartbeat is None
        ),
        open_cycles=sum(opened),
        last_cycle=int(cycle or 0),
        queues=await _queues(connection, pool, tenants),
        oldest_ready_s=_age_s(ready, time.time() * 1000),
        oldest_gap_s=_age_s(gaps, parse_ms(clock)),
        counters={name.decode(): float(value) for name, value in counters.items()},
        weights=weights,
        measured_tokens_per_s=float(json.loads(record)["tokens_per_s"]) if record else 0.0,
        ready_runs=ready_runs,
        scaling=parse_scaling(scaling),
        paused=frozenset(TenantId(name.decode()) for name in paused),
    )


async def _active_tenants(connection: Connection, pool: PoolId) -> list[TenantId]:
    names = await connection.smembers(run_keys.queue_tenants(pool))
    return sorted(TenantId(name.decode()) for name in names)


async def _queues(
    connection: Connection, pool: PoolId, tenants: Sequence[TenantId]
) -> tuple[QueueStatus, ...]:
    queue_loads = async_script(connection, "queue_loads")
    queues: list[QueueStatus] = []
    for first in range(0, len(tenants), TENANTS_AT_ONCE):
        part = tenants[first : first + TENANTS_AT_ONCE]
        row = await queue_loads([], {"prefix": fleet_keys.prefix(pool), "tenants": part})
        numbers = map(int, json.loads(row))
        queues += map(QueueStatus, part, *[numbers] * 5)
    return tuple(queues)


async def pools_with_workers(connection: Connection, pools: Iterable[PoolId]) -> frozenset[PoolId]:
    """Name those of these pools that have a living worker which does not leave: nothing but heartbeats is read."""
    alive = set()
    for pool in pools:
        ids = [
            WorkerId(name.decode()) for name in await connection.smembers(fleet_keys.workers(pool))
        ]
        rows = await connection.mget([fleet_keys.worker(pool, name) for name in ids]) if ids else []
        if any(row and not json.loads(row).get("hands_over") for row in rows):
            alive.add(pool)
    return frozenset(alive)


async def pools_to_zero(connection: Connection, pools: Iterable[PoolId]) -> frozenset[PoolId]:
    """Name those of these pools that the operator lets be without a worker (`COTRAIN_WORKERS_MIN=0`)."""
    names = list(pools)
    rows = await connection.mget([fleet_keys.scaling(name) for name in names]) if names else []
    found = zip(names, map(parse_scaling, rows), strict=True)
    return frozenset(name for name, scaling in found if scaling and scaling.bounds.least == 0)


async def cycle_records(connection: Connection, pool: PoolId, count: int) -> list[dict[str, Any]]:
    """Read the records of the last `count` cycles, newest first."""
    return [
        json.loads(row) for row in await connection.lrange(fleet_keys.cycles(pool), 0, count - 1)
    ]


async def cycle_record(connection: Connection, pool: PoolId, cycle: int) -> dict[str, Any] | None:
    """Read the record of one cycle, near where its number should lie; None where it is not kept.

    Cycles of several workers end in another order than they began.
    """
    newest = await cycle_records(connection, pool, 1)
    if not newest:
        return None
    first = max(0, newest[0]["cycle"] - cycle - READ_AT_ONCE // 2)
    rows = await connection.lrange(fleet_keys.cycles(pool), first, first + READ_AT_ONCE - 1)
    found = (json.loads(row) for row in rows if b'"cycle": %d,' % cycle in row)
    return next((record for record in found if record["cycle"] == cycle), None)


async def session_cycles(
    connection: Connection, pool: PoolId, session: SessionId
) -> list[dict[str, Any]]:
    """Read a pool's cycle records with a run of this session, oldest first; `runs` holds only its own.

    The others are not even decoded. A record that moves on while this reads is read twice, and kept once.
    """
    found: dict[int, dict[str, Any]] = {}
    for first in range(0, fleet_keys.CYCLES_KEPT, READ_AT_ONCE):
        rows = await connection.lrange(fleet_keys.cycles(pool), first, first + READ_AT_ONCE - 1)
        for row in rows:
            if session.encode() in row:
                record = json.loads(row)
                record["runs"] = [run for run in record["runs"] if _is_of(session, run["run"])]
                found[record["cycle"]] = record
        if len(rows) < READ_AT_ONCE:
            break
    return [found[cycle] for cycle in sorted(found) if found[cycle]["runs"]]


async def redis_status(connection: Connection) -> RedisStatus:
    """Ask Redis how it is."""
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


async def scheduler_alive(connection: Connection) -> bool:
    """Tell whether some scheduler holds the lease."""
    return bool(await connection.exists(fleet_keys.scheduler_lease()))


async def scheduler_epoch(connection: Connection) -> int:
    """Read the fencing number of the newest scheduler."""
    return int(await connection.get(fleet_keys.scheduler_epoch()) or 0)


def _age_s(oldest: list[tuple[bytes, float]], now_ms: float) -> float:
    return max(0.0, (now_ms - oldest[0][1]) / 1000) if oldest else 0.0


def _is_of(session: SessionId, run: str) -> bool:
    return run.partition(":")[0] == session
