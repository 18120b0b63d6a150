"""Sessions, runs, samplers, checkpoints and pools, always read through a tenant: there is no call without one.

A foreign id and an unknown id give the same error, so that no client learns what exists.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
from cotrain_store.keys import fleet_keys, run_keys, tenant_keys, weights_keys
from cotrain_store.messages.ids import (
    PoolId,
    RunId,
    SamplerId,
    SessionId,
    TenantId,
    WeightsRef,
    decode,
    encode,
)
from cotrain_store.messages.ops import (
    WEIGHTS_FIELDS,
    pool_record,
    run_record,
    session_record,
    weights_record,
)
from cotrain_store.messages.runs import FinishReason, PoolRecord, RunRecord, SessionRecord
from cotrain_store.messages.samples import SamplerRecord
from cotrain_store.messages.saves import CheckpointRecord, WeightsRecord
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.tenants.policies import LimitsOf

#: Session ids, and run ids (`<session>:train:<n>`). Anything else a client sends names no record.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}(:train:[0-9]{1,20})?")
_SAMPLER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}:sample:[0-9]{1,20}")
_PATH = re.compile(
    r"tinker://(?P<run>[A-Za-z0-9_-]{1,64}:train:[0-9]{1,20})"
    r"/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})"
)


@dataclass(frozen=True)
class RecordLimits:
    """How many living sessions and samplers one tenant may have, and what is kept of all."""

    sessions: int = 10_000
    samplers: int = 10_000
    record_bytes: int = 200_000_000


class Records:
    """Read and write the records a tenant owns."""

    def __init__(
        self,
        connection: Connection,
        limits_of: LimitsOf[RecordLimits] | None = None,
        base_models: Iterable[str] = (),
    ) -> None:
        """`base_models` are those the operator serves now; none named: every one a worker had."""
        self._redis = connection
        self._base_models = frozenset(base_models)
        self._limits_of = limits_of or _default_limits
        self._session = async_script(connection, "session")
        self._sampler = async_script(connection, "sampler")

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
        """Open a session. Its id is 128 random bits: it is part of every run and request id.

        Only the API key `key_id` may acknowledge results of the session; without one any key of the tenant may.
        With a `session_id` that only this tenant's requests can lead to, twice is one session.

        Raises:
            SESSION_QUOTA_REACHED: later.
            RECORD_QUOTA_REACHED: for good.
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
        limits = await self._limits_of(tenant)
        script_keys = [
            tenant_keys.session(session.id), tenant_keys.tenant_sessions(tenant),
            tenant_keys.living_sessions(tenant),
        ]  # fmt: skip
        args = {
            "session": session.id, "tenant": tenant, "record": encode(session), "key": key_id,
            "created_at": session.created_at, "now_ms": int(session.created_at * 1000),
            "heartbeat_ttl_ms": tenant_keys.SESSION_HEARTBEAT_TTL_MS,
            "max_sessions": limits.sessions, "max_record_bytes": limits.record_bytes,
        }  # fmt: skip
        answer = await self._session(script_keys, args)
        if answer == b"SESSIONS":
            raise Refused(Reason.SESSION_QUOTA_REACHED)
        if answer == b"RECORDS":
            raise Refused(Reason.RECORD_QUOTA_REACHED)
        await self._mark_alive(session)
        return session

    async def check_record_quota(self, tenant: TenantId) -> None:
        """Return when another session or run of a tenant may be kept; raises RECORD_QUOTA_REACHED."""
        kept = await self._redis.get(tenant_keys.record_bytes(tenant))
        if int(kept or 0) >= (await self._limits_of(tenant)).record_bytes:
            raise Refused(Reason.RECORD_QUOTA_REACHED)

    async def session(self, tenant: TenantId, session_id: str) -> SessionRecord:
        """Find a session; raises SESSION_NOT_FOUND."""
        row = await self._row(tenant_keys.session(SessionId(session_id)), session_id)
        if not row:
            raise Refused(Reason.SESSION_NOT_FOUND)
        session = session_record(row)
        if session.tenant != tenant:
            raise Refused(Reason.SESSION_NOT_FOUND)
        return session

    async def heartbeat(self, tenant: TenantId, session_id: str) -> None:
        """Note a heartbeat; raises SESSION_NOT_FOUND, or SESSION_FINISHED once it has ended."""
        session = await self.session(tenant, session_id)
        if session.finished_at is not None:
            raise Refused(Reason.SESSION_FINISHED)
        await self._mark_alive(session)

    async def assign_project(self, tenant: TenantId, session_id: str, project_id: str) -> None:
        """Put a session, with all it has, into a project; raises SESSION_NOT_FOUND."""
        session = await self.session(tenant, session_id)
        await self._redis.hset(tenant_keys.session(session.id), "project_id", project_id)

    async def finish(
        self, tenant: TenantId, session_id: str, reason: FinishReason
    ) -> tuple[RunId, ...]:
        """End a session and name its runs, for the caller to close. The first reason wins."""
        session = await self.session(tenant, session_id)
        name = tenant_keys.session(session.id)
        await self._redis.hsetnx(name, "reason", reason)
        await self._redis.hsetnx(name, "finished_at", repr(time.time()))  # last: it has a reason
        await self._redis.zrem(tenant_keys.living_sessions(tenant), session.id)
        members = await self._redis.smembers(tenant_keys.session_runs(session.id))
        return tuple(sorted(RunId(member.decode()) for member in members))

    async def run(self, tenant: TenantId, run_id: str) -> RunRecord:
        """Find a run; raises RunNotFound."""
        row = await self._row(run_keys.run(RunId(run_id)), run_id)
        if not row:
            raise RunNotFound
        run = run_record(row)
        if run.tenant != tenant:
            raise RunNotFound
        return run

    async def pools(self) -> tuple[PoolRecord, ...]:
        """List the base models that are or were served here, by name."""
        rows = await self._redis.hvals(fleet_keys.pools())
        return tuple(sorted((pool_record(row) for row in rows), key=lambda pool: pool.base_model))

    async def served_pools(self) -> tuple[PoolRecord, ...]:
        """List the base models that new runs and samplers may have, by name."""
        pools = await self.pools()
        return tuple(p for p in pools if not self._base_models or p.base_model in self._base_models)

    async def pool_of(self, base_model: str) -> PoolRecord:
        """Find the pool of a base model, whether a worker of it is there now or not.

        Raises:
            BASE_MODEL_STARTING: this server is set to serve it, and its first worker is not there yet.
            BaseModelNotServed: it is not served here; it names those that are.
        """
        pools = await self.served_pools()
        for pool in pools:
            if pool.base_model == base_model:
                return pool
        if base_model in self._base_models:
            raise Refused(Reason.BASE_MODEL_STARTING)
        served = ", ".join(pool.base_model for pool in pools) or "none yet"
        raise BaseModelNotServed(
            f"Base model {base_model!r} is not served here. Available: {served}."
        )

    async def pool(self, pool_id: PoolId) -> PoolRecord | None:
        """Find a pool by its id."""
        row = await self._redis.hget(fleet_keys.pools(), pool_id)
        return pool_record(row) if row else None

    async def sampler(self, tenant: TenantId, sampler: str) -> SamplerRecord:
        """Find a sampler; raises SamplerNotFound."""
        text = (
            await self._redis.get(run_keys.sampler(SamplerId(sampler)))
            if _SAMPLER_ID.fullmatch(sampler)
            else None
        )
        record = decode(SamplerRecord, json.loads(text)) if text else None
        if record is None or record.tenant != tenant:
            raise SamplerNotFound
        return record

    async def create_sampler(self, record: SamplerRecord) -> SamplerRecord:
        """Make a sampler, or find the one that was made under this id with the same settings.

        Raises:
            SeqConflict: this id was used with other settings.
            SESSION_FINISHED: its session has ended.
            CheckpointNotFound: its weights were forgotten.
            SAMPLER_QUOTA_REACHED: later.
        """
        weights = record.weights or WeightsRef("")
        script_keys = [
            run_keys.sampler(record.id), tenant_keys.session(record.session),
            weights_keys.weights(weights), weights_keys.weights_users(weights),
            tenant_keys.session_samplers(record.session),
        ]  # fmt: skip
        args = {
            "sampler": record.id, "tenant": record.tenant, "record": encode(record),
            "has_weights": record.weights is not None,
            "idle_ms": run_keys.sampler_idle_ms(ephemeral=record.ephemeral),
            "max_samplers": (await self._limits_of(record.tenant)).samplers,
        }  # fmt: skip
        answer = await self._sampler(script_keys, args)
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
        """List the living samplers of a session that was found through its tenant, by age."""
        members = await self._redis.smembers(tenant_keys.session_samplers(session))
        names = [run_keys.sampler(SamplerId(member.decode())) for member in members]
        rows = await self._redis.mget(names) if names else []
        living = [decode(SamplerRecord, json.loads(row)) for row in rows if row]
        return tuple(sorted(living, key=lambda sampler: sampler.created_at))

    async def checkpoint(self, tenant: TenantId, path: str) -> CheckpointRecord:
        """Find a checkpoint by its `tinker://` path.

        Raises:
            MalformedPath: it is none.
            CheckpointNotFound: unknown, expired, not stored yet, or another tenant's that is not public.
        """
        named = _PATH.fullmatch(path)
        if not named or ".." in named["name"]:
            raise MalformedPath
        name = weights_keys.checkpoint(RunId(named["run"]), named["kind"], named["name"])
        text = await self._redis.get(name)
        record = decode(CheckpointRecord, json.loads(text)) if text else None
        if record is None or not (record.public or record.tenant == tenant):
            raise CheckpointNotFound
        return record

    async def weights(self, ref: WeightsRef) -> WeightsRecord:
        """Read what weights are; raises CheckpointNotFound once they are forgotten."""
        row = await self._redis.hmget(weights_keys.weights(ref), WEIGHTS_FIELDS)
        if row[0] is None:
            raise CheckpointNotFound
        return weights_record(row)

    async def _row(self, key: str, asked_for: str) -> dict[bytes, bytes]:
        """Read a record that a client named; nothing for a name that none of ours has."""
        if not _ID.fullmatch(asked_for):
            return {}
        row: dict[bytes, bytes] = await self._redis.hgetall(key)
        return row

    async def _mark_alive(self, session: SessionRecord) -> None:
        now, ttl_ms = time.time(), tenant_keys.SESSION_HEARTBEAT_TTL_MS
        async with self._redis.pipeline() as pipeline:
            pipeline.set(tenant_keys.session_heartbeat(session.id), repr(now), px=ttl_ms)
            pipeline.zadd(
                tenant_keys.living_sessions(session.tenant), {session.id: int(now * 1000) + ttl_ms}
            )
            await pipeline.execute()


async def _default_limits(_: TenantId) -> RecordLimits:
    return RecordLimits()


def _settings(sampler: SamplerRecord) -> tuple[str, str | None, bool]:
    """Name what a repeat must have in common; a name may have moved to other weights since."""
    return sampler.base_model, sampler.model_path, sampler.ephemeral
