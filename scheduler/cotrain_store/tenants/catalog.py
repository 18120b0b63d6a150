"""Lists of a tenant's runs, checkpoints and sessions, newest first, and the display names of tenants.

A page is cut by position (`offset`). Items added while a client pages shift the others by one. A page then repeats the
end of the previous one, and nothing is left out. Deletions shift items back.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cotrain_store import redis_keys
from cotrain_store.errors import RunNotFound
from cotrain_store.messages.ids import RunId, SessionId, TenantId, decode
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, SessionRecord, session_record
from cotrain_store.redis_client.connection import CONNECTION_LOST, Connection, SyncConnection, replies
from cotrain_store.tenants.checkpoints import Checkpoints
from cotrain_store.tenants.records import Records, read_runs

Item = TypeVar("Item")
READ_AT_ONCE = 100
"""Number of checkpoints that a search reads in one go."""


@dataclass(frozen=True)
class Page(Generic[Item]):
    """Part of a list, and the length of the whole list."""

    items: tuple[Item, ...]
    total_count: int


@dataclass(frozen=True)
class RunEntry:
    """List entry of a run. For another tenant's run it has published checkpoints only."""

    run: RunRecord
    last_checkpoint: CheckpointRecord | None  # newest checkpoint of kind `weights`
    last_sampler_checkpoint: CheckpointRecord | None


class Catalog:
    """Lists of a tenant's records, and of published records of others."""

    def __init__(self, connection: Connection, records: Records, checkpoints: Checkpoints) -> None:
        self._redis = connection
        self._records = records
        self._checkpoints = checkpoints

    async def runs(
        self, tenant: TenantId, offset: int, limit: int, project: str | None = None, among: Container[str] | None = None
    ) -> Page[RunEntry]:
        """Return a page of a tenant's runs, optionally of one project, or `among` these."""
        await self._checkpoints.remove_expired(tenant)
        sessions = None if project is None else await self._sessions_in(tenant, project)

        def is_shown(run: str) -> bool:
            in_project = sessions is None or run.partition(":")[0] in sessions
            return in_project and (among is None or run in among)

        keep = None if sessions is None and among is None else is_shown
        page = await self._page(redis_keys.training_runs(tenant), offset, limit, keep)
        runs = await read_runs(self._redis, map(RunId, page.items))
        return Page(tuple(await self._own_entries(runs)), page.total_count)

    async def accessible_runs(self, tenant: TenantId, offset: int, limit: int) -> Page[RunEntry]:
        """Return a page of a tenant's runs, and of others' runs with a published checkpoint."""
        await self._checkpoints.remove_expired(tenant)
        own = await self._redis.zrange(redis_keys.training_runs(tenant), 0, -1, withscores=True)
        published = await self._published()
        others = [run for run in await read_runs(self._redis, published) if run.tenant != tenant]
        created_at = {RunId(name.decode()): score for name, score in own}
        created_at |= {run.id: run.created_at for run in others}
        newest_first = sorted(created_at, key=lambda run: (created_at[run], run), reverse=True)
        shown = newest_first[offset : offset + limit]
        entry_by_run = {run.id: _entry(run, published[run.id]) for run in others}
        runs = await read_runs(self._redis, [run for run in shown if run not in entry_by_run])
        entry_by_run |= {entry.run.id: entry for entry in await self._own_entries(runs)}
        return Page(tuple(entry_by_run[run] for run in shown), len(newest_first))

    async def run(self, tenant: TenantId, name: str, *, accessible: bool) -> RunEntry:
        """Return one run; raises RunNotFound."""
        await self._checkpoints.remove_expired(tenant)
        try:
            run = await self._records.run(tenant, name)
        except RunNotFound:
            published = (await self._published()).get(RunId(name), []) if accessible else []
            if not published:
                raise
            return _entry((await read_runs(self._redis, [RunId(name)]))[0], published)
        return (await self._own_entries([run]))[0]

    async def checkpoints_of(self, tenant: TenantId, run: str) -> Sequence[CheckpointRecord]:
        """Return the checkpoints of one run; for another tenant's run, the published ones. Raises RunNotFound: unknown,
        or another tenant's without a published checkpoint.
        """
        await self._checkpoints.remove_expired(tenant)
        try:
            own = await self._records.run(tenant, run)
        except RunNotFound:
            published = (await self._published()).get(RunId(run))
            if not published:
                raise
            return published
        names = await self._redis.zrange(redis_keys.run_checkpoints(own.id), 0, -1, desc=True)
        return await self._checkpoint_records(f"{own.id}/{name.decode()}" for name in names)

    async def checkpoints(
        self, tenant: TenantId, offset: int, limit: int, keep: Callable[[str], bool] | None = None
    ) -> Page[CheckpointRecord]:
        """Return a page of a tenant's checkpoints, filtered by `keep` on `<run>/<kind>/<name>`."""
        await self._checkpoints.remove_expired(tenant)
        page = await self._page(redis_keys.tenant_checkpoints(tenant), offset, limit, keep)
        return Page(tuple(await self._checkpoint_records(page.items)), page.total_count)

    async def search_checkpoints(
        self,
        tenant: TenantId,
        after: tuple[int, str] | None,
        limit: int,
        matches: Callable[[CheckpointRecord, RunRecord, SessionRecord], bool],
    ) -> tuple[list[tuple[CheckpointRecord, RunRecord]], tuple[int, str] | None]:
        """Return up to `limit` matching checkpoints of a tenant after a position, newest first, and the next position.

        A position is the time in µs and the member of the last checkpoint. It is None at the end.
        """
        await self._checkpoints.remove_expired(tenant)
        rows = await self._redis.zrange(redis_keys.tenant_checkpoints(tenant), 0, -1, withscores=True)
        newest_first = sorted(((round(score * 1_000_000), name.decode()) for name, score in rows), reverse=True)
        left = [each for each in newest_first if after is None or each < after]
        found: list[tuple[CheckpointRecord, RunRecord]] = []
        for start in range(0, len(left), READ_AT_ONCE):
            part = left[start : start + READ_AT_ONCE]
            records = await self._checkpoint_records(name for _, name in part)
            runs = await self.runs_of(records)
            sessions = await self.session_records({run.session for run in runs.values()})
            record_by_member = {f"{r.run}/{r.kind}/{r.name}": r for r in records}
            for position in part:
                record = record_by_member.get(position[1])
                run = runs.get(record.run) if record else None
                if record and run and matches(record, run, sessions[run.session]):
                    found.append((record, run))
                    if len(found) == limit:
                        return found, None if position == left[-1] else position
        return found, None

    async def runs_of(self, records: Sequence[CheckpointRecord]) -> dict[RunId, RunRecord]:
        """Return the runs of checkpoints that the caller may read."""
        names = list(dict.fromkeys(record.run for record in records))
        return {run.id: run for run in await read_runs(self._redis, names)}

    async def sessions(self, tenant: TenantId, offset: int, limit: int) -> tuple[SessionId, ...]:
        """Return a page of sessions."""
        page = await self._page(redis_keys.tenant_sessions(tenant), offset, limit)
        return tuple(SessionId(name) for name in page.items)

    async def session_runs(self, session: SessionId) -> list[RunId]:
        """Return the runs of a session, in order of creation. The caller has checked the tenant."""
        members = await self._redis.smembers(redis_keys.session_runs(session))
        return sorted((RunId(member.decode()) for member in members), key=lambda run: (len(run), run))

    async def session_records(self, sessions: Iterable[SessionId]) -> dict[SessionId, SessionRecord]:
        """Return the records of sessions that a tenant's own records name."""
        names = list(sessions)
        rows = await replies(self._redis, (("HGETALL", redis_keys.session(name)) for name in names))
        return {name: session_record(row) for name, row in zip(names, rows, strict=True) if row}

    async def _page(self, key: str, offset: int, limit: int, keep: Callable[[str], bool] | None = None) -> Page[str]:
        """Return a page of a sorted set, or of its members that pass `keep`."""
        if keep is None:
            pipeline = self._redis.pipeline()
            pipeline.zrange(key, offset, offset + limit - 1, desc=True)
            pipeline.zcard(key)
            members, total = await pipeline.execute()
            return Page(tuple(member.decode() for member in members), total)
        members = await self._redis.zrange(key, 0, -1, desc=True)
        kept = [name for name in (member.decode() for member in members) if keep(name)]
        return Page(tuple(kept[offset : offset + limit]), len(kept))

    async def _own_entries(self, runs: Sequence[RunRecord]) -> list[RunEntry]:
        """Return the entries of runs, with their newest checkpoints."""
        rows = await replies(self._redis, (("ZREVRANGE", redis_keys.run_checkpoints(run.id), 0, -1) for run in runs))
        newest = [_newest_of_each_kind(run.id, names) for run, names in zip(runs, rows, strict=True)]
        found = await self._checkpoint_records(member for members in newest for member in members)
        return [_entry(run, [record for record in found if record.run == run.id]) for run in runs]

    async def _checkpoint_records(self, members: Iterable[str]) -> list[CheckpointRecord]:
        """Return checkpoints, without those deleted since they were listed."""
        names = [redis_keys.checkpoint(*_parts(member)) for member in members]
        rows = await self._redis.mget(names) if names else []
        return [decode(CheckpointRecord, json.loads(row)) for row in rows if row]

    async def _published(self) -> dict[RunId, list[CheckpointRecord]]:
        """Return all published checkpoints by run, newest first."""
        members = await self._redis.smembers(redis_keys.published())
        records = await self._checkpoint_records(member.decode() for member in members)
        by_run: dict[RunId, list[CheckpointRecord]] = {}
        for record in sorted(records, key=lambda record: record.created_at, reverse=True):
            by_run.setdefault(record.run, []).append(record)
        return by_run

    async def _sessions_in(self, tenant: TenantId, project: str) -> frozenset[str]:
        members = await self._redis.zrange(redis_keys.tenant_sessions(tenant), 0, -1)
        sessions = await self.session_records(SessionId(member.decode()) for member in members)
        return frozenset(name for name, found in sessions.items() if found.project_id == project)


def _entry(run: RunRecord, newest_first: Sequence[CheckpointRecord]) -> RunEntry:
    def first(kind: str) -> CheckpointRecord | None:
        return next((found for found in newest_first if found.kind == kind), None)

    return RunEntry(run, first("weights"), first("sampler_weights"))


def _newest_of_each_kind(run: RunId, newest_first: Sequence[bytes]) -> list[str]:
    by_kind: dict[bytes, str] = {}
    for name in newest_first:
        by_kind.setdefault(name.partition(b"/")[0], f"{run}/{name.decode()}")
    return list(by_kind.values())


def _parts(member: str) -> tuple[RunId, str, str]:
    run, kind, name = member.split("/")
    return RunId(run), kind, name


async def name_tenant(connection: Connection, tenant: TenantId, name: str) -> None:
    """Set a tenant's display name from its first key; later names are ignored."""
    await connection.hsetnx(redis_keys.tenant_names(), tenant, name)


async def tenant_names(connection: Connection, tenants: Collection[TenantId]) -> dict[TenantId, str]:
    """Return display names, without tenants that never had a key."""
    ids = sorted(tenants)
    return _named(ids, await connection.hmget(redis_keys.tenant_names(), ids)) if ids else {}


#: Maximum length of a list of tenants to choose from.
TENANTS_OFFERED = 500


async def offered_tenants(connection: Connection) -> dict[TenantId, str]:
    """Return the display names of all tenants, sorted; nothing above TENANTS_OFFERED.

    A name that several tenants have is followed by the beginning of the id.
    """
    if await connection.hlen(redis_keys.tenant_names()) > TENANTS_OFFERED:
        return {}
    rows = await connection.hgetall(redis_keys.tenant_names())
    names = {TenantId(id_.decode()): name.decode() for id_, name in rows.items()}
    tenants_by_name = Counter(names.values())
    names |= {each: f"{name} ({each[:8]}…)" for each, name in names.items() if name and tenants_by_name[name] > 1}
    return dict(sorted(names.items(), key=lambda row: (row[1].casefold(), row[0])))


class TenantNames:
    """Display names for a process that writes a line per cycle; known names are cached."""

    def __init__(self, connection: SyncConnection) -> None:
        self._redis = connection
        self._known: dict[TenantId, str] = {}

    def of(self, tenants: Collection[TenantId]) -> dict[TenantId, str]:
        """Return display names, without unknown ones and those unread while Redis is unavailable."""
        unknown = sorted(set(tenants) - self._known.keys())
        if unknown:
            try:
                found = self._redis.hmget(redis_keys.tenant_names(), unknown)
            except CONNECTION_LOST:
                found = [None] * len(unknown)
            self._known.update(_named(unknown, found))
        return {tenant: self._known[tenant] for tenant in tenants if tenant in self._known}


def _named(tenants: Sequence[TenantId], names: Sequence[bytes | None]) -> dict[TenantId, str]:
    found = zip(tenants, names, strict=True)
    return {tenant: name.decode() for tenant, name in found if name is not None}
