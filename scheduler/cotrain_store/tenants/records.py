"""Records of sessions, runs, samplers, checkpoints and pools. A tenant's records are read only through the tenant.

An id of another tenant and an unknown id give the same error, so that clients cannot probe for ids.
"""

import json
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.errors import (
    BaseModelNotServed,
    CheckpointNotFound,
    MalformedPath,
    Reason,
    Refused,
    RunNotFound,
    SamplerNotFound,
    SeqConflict,
)
from cotrain_store.messages.ids import PoolId, RunId, SamplerId, SessionId, TenantId, WeightsRef, decode, encode
from cotrain_store.messages.runs import (
    WEIGHTS_FIELDS,
    CheckpointRecord,
    FinishReason,
    PoolRecord,
    RunRecord,
    SamplerRecord,
    SessionRecord,
    WeightsRecord,
    created_run,
    pool_record,
    run_record,
    session_record,
    weights_record,
)
from cotrain_store.redis_client.connection import Connection, replies
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.tenants.quotas import QuotasOf, default_quotas

#: Session ids, and run ids (`<session>:train:<n>`). Any other text identifies no record.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}(:train:[0-9]{1,20})?")
_SAMPLER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}:sample:[0-9]{1,20}")
_PATH = re.compile(
    r"tinker://(?P<run>[A-Za-z0-9_-]{1,64}:train:[0-9]{1,20})"
    r"/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})"
)


#: Maximum number of created runs that are kept in memory.
_RUNS_KEPT = 4_096


async def read_runs(connection: Connection, runs: Iterable[RunId]) -> list[RunRecord]:
    """Return the runs of these ids, which the caller may read. Missing ones are left out."""
    rows = await replies(connection, (("HGETALL", redis_keys.run(run)) for run in runs))
    return [run_record(row) for row in rows if row]


class Records:
    """Reader and writer of the records of tenants."""

    def __init__(
        self, connection: Connection, quotas_of: QuotasOf = default_quotas, base_models: Iterable[str] = ()
    ) -> None:
        """Store the base models that the operator serves now. If empty, every base model with a pool is served."""
        self._redis = connection
        self._base_models = frozenset(base_models)
        self._quotas_of = quotas_of
        self._session = async_script(connection, "session")
        self._sampler = async_script(connection, "sampler")
        self._created_runs: dict[str, RunRecord] = {}

    async def create_session(
        self,
        tenant: TenantId,
        *,
        sdk_version: str = "",
        tags: tuple[str, ...] = (),
        user_metadata: dict[str, Any] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
        session_id: SessionId | None = None,
        key_id: str = "",
    ) -> SessionRecord:
        """Open a session. Its id has 128 random bits, because it is part of every run and request id.

        Only the API key `key_id` may acknowledge results of the session; without `key_id`, any key of the tenant.
        With a `session_id`, which must be derived from this tenant's requests only, a repeat opens no second session.

        Raises:
            SESSION_QUOTA_REACHED: transient.
            RECORD_QUOTA_REACHED: permanent.
        """
        session = SessionRecord(
            id=session_id or SessionId(secrets.token_hex(16)),
            tenant=tenant,
            created_at=time.time(),
            sdk_version=sdk_version,
            tags=tags,
            user_metadata=user_metadata or {},
            project_id=project_id,
            display_name=display_name,
        )
        quotas = await self._quotas_of(tenant)
        args = {
            "session": session.id, "tenant": tenant, "record": encode(session), "key": key_id,
            "created_at": session.created_at, "now_ms": int(session.created_at * 1000),
            "heartbeat_ttl_ms": redis_keys.SESSION_HEARTBEAT_TTL_MS,
            "max_sessions": quotas.sessions, "max_record_bytes": quotas.record_bytes,
        }  # fmt: skip
        answer = await self._session(args)
        if answer == b"SESSIONS":
            usage = f"{quotas.sessions:,} of {quotas.sessions:,} sessions of this tenant are open"
            remedy = "Close a client, or wait until idle sessions end."
            raise Refused(Reason.SESSION_QUOTA_REACHED, f"{usage} (quota sessions). {remedy}")
        if answer == b"RECORDS":
            raise Refused(Reason.RECORD_QUOTA_REACHED)
        await self._mark_alive(session)
        return session

    async def check_record_quota(self, tenant: TenantId) -> None:
        """Raise RECORD_QUOTA_REACHED if no further session or run of a tenant may be recorded."""
        kept = await self._redis.get(redis_keys.record_bytes(tenant))
        if int(kept or 0) >= (await self._quotas_of(tenant)).record_bytes:
            raise Refused(Reason.RECORD_QUOTA_REACHED)

    async def session(self, tenant: TenantId, session_id: str) -> SessionRecord:
        """Return a session. Raises SESSION_NOT_FOUND."""
        row = await self._row(redis_keys.session(SessionId(session_id)), session_id)
        if not row:
            raise Refused(Reason.SESSION_NOT_FOUND)
        session = session_record(row)
        if session.tenant != tenant:
            raise Refused(Reason.SESSION_NOT_FOUND)
        return session

    async def open_session(self, tenant: TenantId, session_id: str) -> SessionRecord:
        """Return a session that has not ended. Raises SESSION_NOT_FOUND or SESSION_FINISHED."""
        session = await self.session(tenant, session_id)
        if session.finished_at is not None:
            raise Refused(Reason.SESSION_FINISHED)
        return session

    async def heartbeat(self, tenant: TenantId, session_id: str) -> None:
        """Record a heartbeat. Raises SESSION_NOT_FOUND, or SESSION_FINISHED if the session has ended."""
        await self._mark_alive(await self.open_session(tenant, session_id))

    async def assign_project(self, tenant: TenantId, session_id: str, project_id: str) -> None:
        """Assign a session and its contents to a project. Raises SESSION_NOT_FOUND."""
        session = await self.session(tenant, session_id)
        await self._redis.hset(redis_keys.session(session.id), "project_id", project_id)

    async def finish(self, tenant: TenantId, session_id: str, reason: FinishReason) -> tuple[RunId, ...]:
        """End a session and return its runs, which the caller must close. The first reason is kept."""
        session = await self.session(tenant, session_id)
        name = redis_keys.session(session.id)
        await self._redis.hsetnx(name, "reason", reason)
        # Last, so that a finished session always has a reason.
        await self._redis.hsetnx(name, "finished_at", repr(time.time()))
        await self._redis.zrem(redis_keys.living_sessions(tenant), session.id)
        members = await self._redis.smembers(redis_keys.session_runs(session.id))
        return tuple(sorted(RunId(member.decode()) for member in members))

    async def run(self, tenant: TenantId, run_id: str) -> RunRecord:
        """Return a run. Raises RunNotFound."""
        row = await self._row(redis_keys.run(RunId(run_id)), run_id)
        return _own(run_record(row) if row else None, tenant)

    async def created_run(self, tenant: TenantId, run_id: str) -> RunRecord:
        """Return a run as it was created: its state, notes and last request are not read. Raises RunNotFound.

        It is read once, because this part never changes and no run is ever deleted.
        """
        run = self._created_runs.get(run_id)
        if run is None:
            record = await self._redis.hget(redis_keys.run(RunId(run_id)), "record") if _ID.fullmatch(run_id) else None
            run = _own(created_run(record) if record else None, tenant)
            if len(self._created_runs) >= _RUNS_KEPT:
                self._created_runs.clear()
            self._created_runs[run_id] = run
        return _own(run, tenant)

    async def run_and_pool(self, tenant: TenantId, run_id: str) -> tuple[RunRecord, PoolRecord]:
        """Return a created run and the pool of its base model. Raises RunNotFound or BaseModelNotServed."""
        run = await self.created_run(tenant, run_id)
        pool = await self.pool(run.pool)
        if pool is None:
            raise BaseModelNotServed(f"Base model {run.base_model!r} is not served here any more.")
        return run, pool

    async def pools(self) -> tuple[PoolRecord, ...]:
        """Return the pools of all base models that are or were served, sorted by name."""
        rows = await self._redis.hvals(redis_keys.pools())
        return tuple(sorted((pool_record(row) for row in rows), key=lambda pool: pool.base_model))

    async def served_pools(self) -> tuple[PoolRecord, ...]:
        """Return the pools of base models that new runs and samplers may use, sorted by name."""
        pools = await self.pools()
        return tuple(p for p in pools if not self._base_models or p.base_model in self._base_models)

    async def pool_of(self, base_model: str) -> PoolRecord:
        """Return the pool of a base model, with or without a live worker.

        Raises:
            BASE_MODEL_STARTING: the model is configured, and its first worker has not started yet.
            BaseModelNotServed: the model is not served. The message lists the served ones.
        """
        pools = await self.served_pools()
        for pool in pools:
            if pool.base_model == base_model:
                return pool
        if base_model in self._base_models:
            raise Refused(Reason.BASE_MODEL_STARTING)
        served = ", ".join(pool.base_model for pool in pools) or "none yet"
        raise BaseModelNotServed(f"Base model {base_model!r} is not served here. Available: {served}.")

    async def pool(self, pool_id: PoolId) -> PoolRecord | None:
        """Return the pool of an id, or None."""
        row = await self._redis.hget(redis_keys.pools(), pool_id)
        return pool_record(row) if row else None

    async def sampler(self, tenant: TenantId, sampler: str) -> SamplerRecord:
        """Return a sampler. Raises SamplerNotFound."""
        text = await self._redis.get(redis_keys.sampler(SamplerId(sampler))) if _SAMPLER_ID.fullmatch(sampler) else None
        record = decode(SamplerRecord, json.loads(text)) if text else None
        if record is None or record.tenant != tenant:
            raise SamplerNotFound
        return record

    async def create_sampler(self, record: SamplerRecord) -> SamplerRecord:
        """Create a sampler, or return the existing one with this id and the same settings.

        Raises:
            SeqConflict: this id was used with other settings.
            SESSION_FINISHED: its session has ended.
            CheckpointNotFound: its weights were deleted.
            SAMPLER_QUOTA_REACHED: transient.
        """
        args = {
            "sampler": record.id, "session": record.session, "tenant": record.tenant, "record": encode(record),
            "weights": record.weights or "",
            "idle_ms": redis_keys.sampler_idle_ms(ephemeral=record.ephemeral),
            "max_samplers": (await self._quotas_of(record.tenant)).samplers,
        }  # fmt: skip
        answer = await self._sampler(args)
        if answer == b"SAMPLERS":
            raise Refused(Reason.SAMPLER_QUOTA_REACHED)
        if answer == b"FINISHED":
            raise Refused(Reason.SESSION_FINISHED)
        if answer == b"GONE":
            raise CheckpointNotFound
        known = decode(SamplerRecord, json.loads(answer))
        if _settings(known) != _settings(record):
            raise SeqConflict("This sampling_session_seq_id was already used with other settings.")
        return known

    async def samplers_of(self, session: SessionId) -> tuple[SamplerRecord, ...]:
        """Return the live samplers of a session, oldest first. The session must have been read through its tenant."""
        members = await self._redis.smembers(redis_keys.session_samplers(session))
        names = [redis_keys.sampler(SamplerId(member.decode())) for member in members]
        rows = await self._redis.mget(names) if names else []
        living = [decode(SamplerRecord, json.loads(row)) for row in rows if row]
        return tuple(sorted(living, key=lambda sampler: sampler.created_at))

    async def checkpoint(self, tenant: TenantId, path: str) -> CheckpointRecord:
        """Return the checkpoint of a `tinker://` path.

        Raises:
            MalformedPath: the path is malformed.
            CheckpointNotFound: unknown, expired, not stored yet, or another tenant's and not public.
        """
        named = _PATH.fullmatch(path)
        if not named or ".." in named["name"]:
            raise MalformedPath
        name = redis_keys.checkpoint(RunId(named["run"]), named["kind"], named["name"])
        text = await self._redis.get(name)
        record = decode(CheckpointRecord, json.loads(text)) if text else None
        if record is None or not (record.public or record.tenant == tenant):
            raise CheckpointNotFound
        return record

    async def weights(self, ref: WeightsRef) -> WeightsRecord:
        """Return the record of weights. Raises CheckpointNotFound if they were deleted."""
        row = await self._redis.hmget(redis_keys.weights(ref), WEIGHTS_FIELDS)
        if row[0] is None:
            raise CheckpointNotFound
        return weights_record(row)

    async def _row(self, key: str, asked_for: str) -> dict[bytes, bytes]:
        """Return the record of an id from a client; empty for a malformed or unknown id."""
        if not _ID.fullmatch(asked_for):
            return {}
        row: dict[bytes, bytes] = await self._redis.hgetall(key)
        return row

    async def _mark_alive(self, session: SessionRecord) -> None:
        now, ttl_ms = time.time(), redis_keys.SESSION_HEARTBEAT_TTL_MS
        async with self._redis.pipeline() as pipeline:
            pipeline.set(redis_keys.session_heartbeat(session.id), repr(now), px=ttl_ms)
            pipeline.zadd(redis_keys.living_sessions(session.tenant), {session.id: int(now * 1000) + ttl_ms})
            await pipeline.execute()


def _own(run: RunRecord | None, tenant: TenantId) -> RunRecord:
    if run is None or run.tenant != tenant:
        raise RunNotFound
    return run


def _settings(sampler: SamplerRecord) -> tuple[str, str | None, bool]:
    """Return the settings that a repeat must share. The weights are not among them: a name may have moved to others."""
    return sampler.base_model, sampler.model_path, sampler.ephemeral
