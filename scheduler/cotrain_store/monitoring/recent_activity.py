"""Recent activity, for pages: cycle records, the newest ops of a run, and the last hour of a pool."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.messages.ids import PoolId, RunId, SessionId, TenantId, WorkerId, request_id
from cotrain_store.messages.ops import QueuedOp, Result, ResultKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.redis_client.connection import Connection, replies
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.usage import MINUTE_FIELDS, minute_of, tenant_seconds, tenant_tokens

#: Maximum cycle records of one read. In a full pool each has about 10 KB, and Redis is blocked while it sends them.
READ_AT_ONCE = 50


async def cycle_records(connection: Connection, pool: PoolId, count: int) -> list[dict[str, Any]]:
    """Read the records of the last `count` cycles, newest first."""
    return [json.loads(row) for row in await connection.lrange(redis_keys.cycles(pool), 0, count - 1)]


async def cycle_record(connection: Connection, pool: PoolId, cycle: int) -> dict[str, Any] | None:
    """Return the record of one cycle, or None if it is not kept.

    It is searched near its expected position, because cycles of several workers do not end in the order of their start.
    """
    newest = await cycle_records(connection, pool, 1)
    if not newest:
        return None
    first = max(0, newest[0]["cycle"] - cycle - READ_AT_ONCE // 2)
    rows = await connection.lrange(redis_keys.cycles(pool), first, first + READ_AT_ONCE - 1)
    found = (json.loads(row) for row in rows if b'"cycle": %d,' % cycle in row)
    return next((record for record in found if record["cycle"] == cycle), None)


async def session_cycles(connection: Connection, pool: PoolId, session: SessionId) -> list[dict[str, Any]]:
    """Return a pool's cycle records with a run of this session, oldest first. `runs` holds only its own runs.

    Other records are not decoded. New records may shift the list during the read, so a record may be read twice; it
    is returned once.
    """
    found: dict[int, dict[str, Any]] = {}
    for first in range(0, redis_keys.CYCLES_KEPT, READ_AT_ONCE):
        rows = await connection.lrange(redis_keys.cycles(pool), first, first + READ_AT_ONCE - 1)
        for row in rows:
            if session.encode() in row:
                record = json.loads(row)
                runs = record["runs"]
                record["runs"] = [r for r in runs if r["run"].partition(":")[0] == session]
                found[record["cycle"]] = record
        if len(rows) < READ_AT_ONCE:
            break
    return [found[cycle] for cycle in sorted(found) if found[cycle]["runs"]]


#: Bytes read of a result. They contain the message of a failure; of other results only the first byte is needed.
_BYTES_READ = 4_096


@dataclass(frozen=True)
class LoggedOp:
    """Op of a log."""

    seq: int
    kind: str  # Kind; empty if the log has no op of this seq: it never arrived, or a snapshot covers it
    tokens: int
    accepted_at: float | None
    result: ResultKind | None
    """Kind of its result; None if the op is not done or the result has expired."""
    error: str  # error message; empty if it did not fail


async def newest_ops(connection: Connection, run: RunRecord, last: int, count: int) -> list[LoggedOp]:
    """Return at most `count` ops up to seq `last`, in order. Ops with neither a log entry nor a result are left out."""
    seqs = range(max(0, last - count + 1), last + 1)
    if not seqs:
        return []
    envelopes, *results = await replies(
        connection,
        [
            ("HMGET", redis_keys.ops(run.pool, run.id), *seqs),
            *(("GETRANGE", redis_keys.result(request_id(run.id, seq)), 0, _BYTES_READ - 1) for seq in seqs),
        ],
    )
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
    except (ValueError, KeyError):  # longer than _BYTES_READ
        return "It failed; its client has the reason."
    return str(text)


async def owners(connection: Connection, pool: PoolId, runs: Sequence[RunId]) -> dict[RunId, WorkerId]:
    """Return the worker of each of these runs of a pool. Ended runs, and runs without a worker, are left out."""
    rows = await replies(connection, (("HMGET", redis_keys.log(pool, run), "state", "worker") for run in runs))
    return {
        run: WorkerId(worker.decode())
        for run, (state, worker) in zip(runs, rows, strict=True)
        if state == b"live" and worker
    }


MINUTES = 60
#: Window in minutes of the tenants' device time in `busiest_tenants`.
TOP_MINUTES = 15
#: Minutes read in one request. With 1,000 tenants, each minute takes Redis 1.6 ms.
MINUTES_AT_ONCE = 3


@dataclass(frozen=True)
class Minute:
    """Counts of one minute. The last minute is incomplete."""

    start_s: int
    counts: Mapping[str, float]
    """Counts by `MINUTE_FIELDS`, and for a requested tenant also `own_tokens` and `own_device_s`."""

    def of(self, name: str) -> float:
        """Return a count; 0 if nothing was counted."""
        return self.counts.get(name, 0.0)


async def last_minutes(
    connection: Connection, pool: PoolId, now_s: float, tenant: TenantId | None = None
) -> list[Minute]:
    """Return the last hour of a pool, oldest minute first, the current one last."""
    starts = _starts(now_s, MINUTES)
    names = list(MINUTE_FIELDS)
    stored = list(MINUTE_FIELDS)
    if tenant is not None:
        names += ["own_tokens", "own_device_s"]
        stored += [tenant_tokens(tenant), tenant_seconds(tenant)]
    rows = await replies(connection, (("HMGET", redis_keys.minute(pool, start), *stored) for start in starts))
    return [
        Minute(start, {name: float(value) for name, value in zip(names, row, strict=True) if value})
        for start, row in zip(starts, rows, strict=True)
    ]


async def busiest_tenants(
    connection: Connection, pools: Sequence[PoolId], now_s: float, count: int
) -> list[tuple[TenantId, float]]:
    """Return the tenants with the most device seconds in the last TOP_MINUTES, in descending order.

    Redis reads MINUTES_AT_ONCE minutes per request, so that it can serve others in between.
    """
    busy_minute = async_script(connection, "busy_minute")
    seconds: defaultdict[TenantId, float] = defaultdict(float)
    for pool in pools:
        starts = _starts(now_s, TOP_MINUTES)
        for first in range(0, TOP_MINUTES, MINUTES_AT_ONCE):
            part = starts[first : first + MINUTES_AT_ONCE]
            rows = (busy_minute({"minute": redis_keys.minute(pool, start)}) for start in part)
            for row in await asyncio.gather(*rows):
                for tenant, value in json.loads(row).items():
                    seconds[TenantId(tenant)] += float(value)
    return sorted(seconds.items(), key=lambda item: (-item[1], item[0]))[:count]


def _starts(now_s: float, minutes: int) -> list[int]:
    newest = minute_of(now_s)
    return [newest - 60 * back for back in range(minutes - 1, -1, -1)]
