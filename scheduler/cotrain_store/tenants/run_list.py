"""List of runs in pages, and the position of each run in its log. The cost of a page does not depend on all runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cotrain.wire.rest import HistoryPoint
from cotrain_store import redis_keys
from cotrain_store.messages.ids import RunId, TenantId
from cotrain_store.messages.runs import RunRecord
from cotrain_store.redis_client.connection import Connection, replies
from cotrain_store.tenants.history import read_points
from cotrain_store.tenants.records import read_runs
from cotrain_store.usage import usage_field, usage_hour

#: Maximum number of records read for one page. A rare match may be several pages later.
LOOKED_AT = 1_000
READ_AT_ONCE = 200
#: Window of a run's device time in hours, including the current one.
USAGE_HOURS = 24


@dataclass(frozen=True)
class RunPosition:
    """Progress of a run in its log, and its device time."""

    accepted: int  # seq of its newest op; -1 before the first
    planned: int  # seq of the newest planned op; -1 before the first
    done: int  # seq of the newest committed op; -1 before the first
    ready_since_ms: float | None
    """Time since which its next op waits for planning; None if none waits."""
    gap_since_ms: float | None  # time since which ops wait for a missing one; None without a gap
    newest: HistoryPoint | None
    device_s: float  # device time in s in the last USAGE_HOURS
    worker: str
    failed: int = 0  # Number of committed ops that failed


@dataclass(frozen=True)
class RunPage:
    """Page of a list of runs, newest first."""

    runs: tuple[RunRecord, ...]
    next_cursor: str  # cursor of the next page; empty at the end
    total_count: int  # number of runs in the whole list, without the filter


class RunList:
    """Reader of the runs of one tenant or of all tenants."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def page(
        self, tenant: TenantId | None, cursor: str, limit: int, keep: Callable[[RunRecord], bool] | None = None
    ) -> RunPage:
        """Return the page after a cursor, filtered by `keep`. A page may have fewer runs than the limit.

        A cursor identifies the last run read, so that new runs do not shift pages.
        """
        key = redis_keys.training_runs(tenant) if tenant else redis_keys.all_training_runs()
        start = await self._start(key, cursor)
        total = await self._redis.zcard(key)
        found: list[RunRecord] = []
        for first in range(start, start + LOOKED_AT, READ_AT_ONCE):
            wanted = READ_AT_ONCE if keep else limit
            names = await self._redis.zrange(key, first, first + wanted - 1, desc=True)
            for run in await read_runs(self._redis, (RunId(name.decode()) for name in names)):
                cursor = f"{run.created_at!r}/{run.id}"
                if keep is None or keep(run):
                    found.append(run)
                if len(found) == limit:
                    is_last = first + len(names) >= total and run.id == names[-1].decode()
                    return RunPage(tuple(found), "" if is_last else cursor, total)
            if len(names) < wanted:
                return RunPage(tuple(found), "", total)
        return RunPage(tuple(found), cursor, total)

    async def positions(self, runs: Sequence[RunRecord], now_s: float) -> dict[RunId, RunPosition]:
        """Return the positions of runs, with a number of round trips that does not depend on theirs."""
        redis, logged = self._redis, ("last", "next", "done", "worker", "failed")
        logs, ready, gaps, steps, used = await asyncio.gather(
            replies(redis, (("HMGET", redis_keys.log(run.pool, run.id), *logged) for run in runs)),
            replies(redis, (("ZSCORE", redis_keys.ready(run.pool), run.id) for run in runs)),
            replies(redis, (("ZSCORE", redis_keys.gaps(run.pool), run.id) for run in runs)),
            # Decoding the last point requires the one before it.
            replies(redis, (("LRANGE", redis_keys.steps(run.id), -2, -1) for run in runs)),
            self._device_seconds(runs, now_s),
        )
        found = {}
        for run, log, ready_since, gap_since, newest in zip(runs, logs, ready, gaps, steps, strict=True):
            last, upcoming, done = (int(value) if value else None for value in log[:3])
            found[run.id] = RunPosition(
                accepted=-1 if last is None else last,
                planned=-1 if upcoming is None else upcoming - 1,
                done=-1 if done is None else done,
                ready_since_ms=ready_since,
                gap_since_ms=gap_since,
                newest=read_points("optim_step", newest)[-1] if newest else None,
                device_s=used[run.id],
                worker=(log[3] or b"").decode(),
                failed=int(log[4] or 0),
            )
        return found

    async def _device_seconds(self, runs: Sequence[RunRecord], now_s: float) -> dict[RunId, float]:
        own: defaultdict[TenantId, list[RunRecord]] = defaultdict(list)
        for run in runs:
            own[run.tenant].append(run)
        first = usage_hour(now_s) - 3600 * (USAGE_HOURS - 1)
        hours = [(tenant, first + 3600 * number) for tenant in own for number in range(USAGE_HOURS)]
        fields = {each: [usage_field("device_s", run.base_model, run.id) for run in own[each]] for each in own}
        rows = await replies(
            self._redis, (("HMGET", redis_keys.usage(tenant, hour), *fields[tenant]) for tenant, hour in hours)
        )
        seconds = {run.id: 0.0 for run in runs}
        for (tenant, _), row in zip(hours, rows, strict=True):
            for run, value in zip(own[tenant], row, strict=True):
                seconds[run.id] += float(value or 0)
        return seconds

    async def _start(self, key: str, cursor: str) -> int:
        """Return the list position after a cursor; 0 for an empty or malformed cursor."""
        created_at, _, run = cursor.partition("/")
        if not run:
            return 0
        rank = await self._redis.zrevrank(key, run)
        if rank is not None:
            return int(rank) + 1
        try:
            return int(await self._redis.zcount(key, f"({float(created_at)!r}", "+inf"))
        except ValueError:
            return 0
