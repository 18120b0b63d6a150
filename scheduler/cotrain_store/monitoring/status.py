"""Records of cycles, the newest ops of a run, and the last hour of a pool, for pages. Reads only."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_store.keys import fleet_keys, result_keys, run_keys
from cotrain_store.keys.fleet_keys import FIELDS, minute_of, tenant_seconds, tenant_tokens
from cotrain_store.messages.ids import (
    PoolId,
    RunId,
    SessionId,
    TenantId,
    WorkerId,
    request_id,
)
from cotrain_store.messages.ops import QueuedOp
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script

#: Cycle records of a full pool have some 10 KB each, and Redis does nothing else while it sends them.
READ_AT_ONCE = 50


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
