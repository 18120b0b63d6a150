"""What operators and dashboards see: workers, queues, cycles, Redis. Reads only.

The newest ops of a run's log, with what became of each; and which worker runs are at. Reads only.

What pools did minute by minute, for charts. Reads only, as many keys as there are minutes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_store.keys import fleet_keys, result_keys, run_keys, tenant_keys, weights_keys
from cotrain_store.keys.fleet_keys import FIELDS, minute_of, tenant_seconds, tenant_tokens
from cotrain_store.messages.fleet import Scaling, WorkerHeartbeat, parse_scaling, restoring_text
from cotrain_store.messages.ids import (
    PoolId,
    RunId,
    SessionId,
    TenantId,
    WorkerId,
    decode,
    request_id,
)
from cotrain_store.messages.ops import QueuedOp
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.monitoring.backlog import backlog_seconds
from cotrain_store.redis_client.connection import Connection, parse_ms
from cotrain_store.redis_client.scripts import async_script

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
        """Count the workers that this pool is to have, `now` in s since 1970: docs/reference/metrics.md has the formula.

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
        return [worker.tokens_per_s for worker in self.workers if not worker.is_handing_over]


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
    pipeline.get(result_keys.clock())
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
        if any(row and not json.loads(row).get("is_handing_over") for row in rows):
            alive.add(pool)
    return frozenset(alive)


async def restoring_workers(
    connection: Connection, pools: Iterable[PoolId]
) -> list[tuple[PoolId, WorkerId, str]]:
    """Return the workers of these pools that restore runs, each with its progress in words."""
    found = []
    for pool in pools:
        ids = [
            WorkerId(name.decode()) for name in await connection.smembers(fleet_keys.workers(pool))
        ]
        rows = await connection.mget([fleet_keys.worker(pool, name) for name in ids]) if ids else []
        for worker, row in zip(ids, rows, strict=True):
            if row and (text := restoring_text(json.loads(row).get("restoring"))):
                found.append((pool, worker, text))
    return sorted(found)


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


#: A failure's sentence lies within this; of other results only the first byte is of interest.
_BYTES_READ = 4_096


@dataclass(frozen=True)
class LoggedOp:
    """One op of a log."""

    seq: int
    kind: str
    """Empty where the log has no op of this seq: it never came, or a snapshot covers it."""
    tokens: int
    accepted_at: float | None
    result: ResultKind | None
    """None without one: not done yet, or expired."""
    error: str
    """Why it failed; empty if it did not."""


async def newest_ops(
    connection: Connection, run: RunRecord, last: int, most: int
) -> list[LoggedOp]:
    """Read the ops up to seq `last`, in order; covered ones of which no result is left are left out."""
    seqs = range(max(0, last - most + 1), last + 1)
    if not seqs:
        return []
    pipeline = connection.pipeline(transaction=False)
    pipeline.hmget(run_keys.ops(run.pool, run.id), [str(seq) for seq in seqs])
    for seq in seqs:
        pipeline.getrange(result_keys.result(request_id(run.id, seq)), 0, _BYTES_READ - 1)
    envelopes, *results = await pipeline.execute()
    rows = zip(seqs, envelopes, results, strict=True)
    return [_op(run, *row) for row in rows if row[1] or row[2]]


def _op(run: RunRecord, seq: int, envelope: bytes | None, result: bytes) -> LoggedOp:
    op = QueuedOp.parse(run.id, seq, envelope.decode()) if envelope else None
    return LoggedOp(
        seq=seq,
        kind=op.kind.value if op else "",
        tokens=op.tokens if op else 0,
        accepted_at=op.accepted_at if op else None,
        result=ResultKind(result[:1].decode()) if result else None,
        error=_error(result),
    )


def _error(result: bytes) -> str:
    if result[:1] != ResultKind.FAILURE.encode():
        return ""
    try:
        text = Result.decode(result).json()["error"]
    except (ValueError, KeyError):  # longer than what was read
        return "It failed; its client has the reason."
    return str(text)


async def owners(
    connection: Connection, pool: PoolId, runs: Sequence[RunId]
) -> dict[RunId, WorkerId]:
    """Say which worker each of these runs of a pool is at; those that ended, or have none, are left out."""
    pipeline = connection.pipeline(transaction=False)
    for run in runs:
        pipeline.hmget(run_keys.log(pool, run), ["state", "worker"])
    rows = await pipeline.execute() if runs else []
    return {
        run: WorkerId(worker.decode())
        for run, (state, worker) in zip(runs, rows, strict=True)
        if state == b"live" and worker
    }


MINUTES = 60
#: Whose share of the device is added up over so many minutes.
TOP_MINUTES = 15
#: Of 1,000 tenants each costs Redis 1.6 ms.
MINUTES_AT_ONCE = 3


@dataclass(frozen=True)
class Minute:
    """What happened in one minute; the last one is not over."""

    start_s: int
    counts: Mapping[str, float]
    """By `minute_fields.FIELDS`; with a tenant asked for, `own_tokens` and `own_device_s` as well."""

    def of(self, name: str) -> float:
        """Give a count; 0 where nothing was counted."""
        return self.counts.get(name, 0.0)


async def last_minutes(
    connection: Connection, pool: PoolId, now_s: float, tenant: TenantId | None = None
) -> list[Minute]:
    """Read the last hour of a pool, oldest minute first, the current one last."""
    starts = _starts(now_s, MINUTES)
    names = list(FIELDS)
    stored = list(FIELDS)
    if tenant is not None:
        names += ["own_tokens", "own_device_s"]
        stored += [tenant_tokens(tenant), tenant_seconds(tenant)]
    pipeline = connection.pipeline(transaction=False)
    for start in starts:
        pipeline.hmget(fleet_keys.minute(pool, start), stored)
    rows = await pipeline.execute()
    return [
        Minute(start, {name: float(value) for name, value in zip(names, row, strict=True) if value})
        for start, row in zip(starts, rows, strict=True)
    ]


async def busiest_tenants(
    connection: Connection, pools: Sequence[PoolId], now_s: float, most: int
) -> list[tuple[TenantId, float]]:
    """Name those that used the most seconds of the devices in the last minutes, the first one first.

    Redis is asked for a few minutes at a time: then others have their turn.
    """
    busy_minute = async_script(connection, "busy_minute")
    seconds: defaultdict[TenantId, float] = defaultdict(float)
    for pool in pools:
        starts = _starts(now_s, TOP_MINUTES)
        for first in range(0, TOP_MINUTES, MINUTES_AT_ONCE):
            part = starts[first : first + MINUTES_AT_ONCE]
            rows = (busy_minute([fleet_keys.minute(pool, start)], {}) for start in part)
            for row in await asyncio.gather(*rows):
                for tenant, value in json.loads(row).items():
                    seconds[TenantId(tenant)] += float(value)
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))[:most]


def _starts(now_s: float, minutes: int) -> list[int]:
    newest = minute_of(now_s)
    return [newest - 60 * back for back in range(minutes - 1, -1, -1)]
