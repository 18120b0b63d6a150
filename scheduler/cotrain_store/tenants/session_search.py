"""Iteration over a tenant's sessions, newest first, for searches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RunId, SessionId, TenantId
from cotrain_store.messages.runs import RunState, SessionRecord, session_record
from cotrain_store.redis_client.connection import Connection, replies
from cotrain_store.tenants.checkpoints import Checkpoints

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
    """Reader of a tenant's sessions, and of the checkpoints in them."""

    def __init__(self, connection: Connection, checkpoints: Checkpoints) -> None:
        self._redis = connection
        self._checkpoints = checkpoints

    async def after(self, tenant: TenantId, cursor: Cursor | None, count: int) -> list[SessionEntry]:
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
