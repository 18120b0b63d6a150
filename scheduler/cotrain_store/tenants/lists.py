"""Lists of runs and of sessions, in pages, and the notes and tags of runs.

The cost of a page does not depend on the number of runs. Notes and tags can be changed at any time, and lists can
be filtered by them.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cotrain.wire.rest import HistoryPoint
from cotrain_store import redis_keys
from cotrain_store.errors import Reason, Refused, RunNotFound
from cotrain_store.messages.ids import RunId, SessionId, TenantId
from cotrain_store.messages.runs import RunRecord, RunState, SessionRecord, session_record, tags_of
from cotrain_store.redis_client.connection import Connection, replies
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.tenants.checkpoints import Checkpoints
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


#: Number of runs whose labels are read in one round trip.
LABELS_READ_AT_ONCE = 1_000


@dataclass(frozen=True)
class LabelQuery:
    """Filter for the labels of a run."""

    tags: tuple[str, ...] = ()  # tags that the run must all have
    text: str = ""  # words that must all occur in the note or a tag, case-insensitive

    def matches(self, note: str, tags: Sequence[str]) -> bool:
        """Return True if a run with these labels matches."""
        written = "\n".join([note, *tags]).casefold()
        return set(self.tags) <= set(tags) and all(word in written for word in self.text.casefold().split())

    def __bool__(self) -> bool:
        return bool(self.tags or self.text.split())


class RunLabels:
    """Notes and tags of runs."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._label = async_script(connection, "run_label")

    async def set(
        self, run: RunRecord, max_record_bytes: int, *, note: str | None = None, tags: Sequence[str] | None = None
    ) -> None:
        """Write a run's note or its tags. None leaves them unchanged.

        Raises:
            RunNotFound: the run does not exist yet.
            RECORD_QUOTA_REACHED: the tenant's records would exceed their maximum bytes.
        """
        args: dict[str, str | int | float] = {
            "run": run.id, "tenant": run.tenant, "created_at": run.created_at,
            "max_record_bytes": max_record_bytes,
        }  # fmt: skip
        if note is not None:
            args["note"] = note
        if tags is not None:
            args["tags"] = json.dumps(list(dict.fromkeys(tags))) if tags else ""
        answer = await self._label(args)
        if answer == b"GONE":
            raise RunNotFound
        if answer == b"RECORDS":
            raise Refused(Reason.RECORD_QUOTA_REACHED)

    async def matching(self, tenant: TenantId, query: LabelQuery) -> frozenset[str]:
        """Return the labelled runs of a tenant that match. Runs without labels never match."""
        names = await self._redis.zrange(redis_keys.labelled_runs(tenant), 0, -1)
        found: set[str] = set()
        for first in range(0, len(names), LABELS_READ_AT_ONCE):
            part = [RunId(name.decode()) for name in names[first : first + LABELS_READ_AT_ONCE]]
            labels = await self.of(part)
            found |= {run for run, (note, tags) in labels.items() if query.matches(note, tags)}
        return frozenset(found)

    async def of(self, runs: Sequence[RunId]) -> Mapping[RunId, tuple[str, tuple[str, ...]]]:
        """Return the notes and tags of runs, which must have been read through their tenant."""
        rows = await replies(self._redis, (("HMGET", redis_keys.run(run), "note", "tags") for run in runs))
        return {run: ((note or b"").decode(), tags_of(tags)) for run, (note, tags) in zip(runs, rows, strict=True)}


#: Factor from a score, which is created_at in s, to the µs of clients.
_MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Cursor:
    """Position in a tenant's list of sessions, after this session in the order from newest to oldest."""

    created_at_us: int
    session: str


@dataclass(frozen=True)
class SessionEntry:
    """One session and its state."""

    cursor: Cursor
    record: SessionRecord
    is_alive: bool  # True if its client sent a heartbeat within SESSION_HEARTBEAT_TTL_MS
    failed_run: RunId | None  # run of the session that the server stopped
    runs: tuple[RunId, ...] = ()


@dataclass(frozen=True)
class Stored:
    """Number and bytes of checkpoints."""

    count: int = 0
    size_bytes: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.count + other.count, self.size_bytes + other.size_bytes)


class SessionSearch:
    """Iteration over a tenant's sessions, newest first."""

    def __init__(self, connection: Connection, checkpoints: Checkpoints) -> None:
        self._redis = connection
        self._checkpoints = checkpoints

    async def behind(self, tenant: TenantId, cursor: Cursor | None, count: int) -> list[SessionEntry]:
        """Return up to `count` sessions after a cursor, or from the newest one without a cursor.

        Sessions added later come before every cursor, so an iteration returns each older session once.
        """
        cursors = await self._cursors(tenant, cursor, count)
        sessions = [SessionId(found.session) for found in cursors]
        rows, alive, members = await asyncio.gather(
            replies(self._redis, (("HGETALL", redis_keys.session(session)) for session in sessions)),
            replies(self._redis, (("EXISTS", redis_keys.session_heartbeat(session)) for session in sessions)),
            replies(self._redis, (("SMEMBERS", redis_keys.session_runs(session)) for session in sessions)),
        )
        runs_by_session = [tuple(RunId(run.decode()) for run in names) for names in members]
        failed = await self._first_failed(sorted(run for runs in runs_by_session for run in runs))
        return [
            SessionEntry(cursor, session_record(row), bool(heartbeat), failed.get(session), runs)
            for cursor, session, row, heartbeat, runs in zip(
                cursors, sessions, rows, alive, runs_by_session, strict=True
            )
        ]

    async def stored(self, tenant: TenantId) -> dict[SessionId, Stored]:
        """Return the number and bytes of the checkpoints of each session."""
        await self._checkpoints.remove_expired(tenant)
        sizes = await self._redis.hgetall(redis_keys.checkpoint_sizes(tenant))
        by_session: dict[SessionId, Stored] = {}
        for member, size in sizes.items():
            session = SessionId(member.decode().partition(":")[0])
            by_session[session] = by_session.get(session, Stored()) + Stored(1, int(size))
        return by_session

    async def _cursors(self, tenant: TenantId, cursor: Cursor | None, count: int) -> list[Cursor]:
        """Return cursors after `cursor`. Those of the same µs are read again and filtered."""
        name = redis_keys.tenant_sessions(tenant)
        if cursor is None:
            rows = await self._redis.zrange(name, 0, count - 1, desc=True, withscores=True)
            return [_cursor(*row) for row in rows]
        newest = (cursor.created_at_us + 1) / _MICROSECONDS
        same = await self._redis.zcount(name, (cursor.created_at_us - 1) / _MICROSECONDS, newest)
        rows = await self._redis.zrange(
            name, newest, "-inf", desc=True, byscore=True, withscores=True, offset=0, num=count + same
        )
        behind = (cursor.created_at_us, cursor.session)
        cursors = [_cursor(*row) for row in rows]
        return [at for at in cursors if (at.created_at_us, at.session) < behind][:count]

    async def _first_failed(self, runs: list[RunId]) -> dict[SessionId, RunId]:
        """Return the first run of each session that the server stopped."""
        rows = await replies(self._redis, (("HGET", redis_keys.run(run), "state") for run in runs))
        states = zip(reversed(runs), reversed(rows), strict=True)
        failed = RunState.FAILED.encode()
        return {SessionId(run.partition(":")[0]): run for run, state in states if state == failed}


def _cursor(session: bytes, created_at_s: float) -> Cursor:
    return Cursor(round(created_at_s * _MICROSECONDS), session.decode())
