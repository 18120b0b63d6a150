"""Audit logs: changes by each tenant and by the operator, each with its key; about the last 10,000 are kept."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum

from cotrain.wire.admin import AuditEvent as AuditEntry
from cotrain_store import redis_keys
from cotrain_store.errors import StoreError, StoreUnavailable
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import Tenant
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script

#: Length of a stream. Redis trims whole nodes of a stream, so it keeps slightly more.
EVENTS_KEPT = 10_000

#: Key id of the operator's acts; the operator has one key.
OPERATOR = "operator"

_DAY_MS = 24 * 3600 * 1000


class AuditEvent(StrEnum):
    """Names of recorded events, `<resource>_<action>` like those of the hosted services."""

    CHECKPOINT_DELETE = "checkpoint_delete"
    CHECKPOINT_PUBLISH = "checkpoint_publish"
    CHECKPOINT_UNPUBLISH = "checkpoint_unpublish"
    CHECKPOINT_SET_TTL = "checkpoint_set_ttl"
    CHECKPOINT_COPY = "checkpoint_copy"
    #: Download links were issued.
    CHECKPOINT_READ = "checkpoint_read"
    #: A foreign adapter became a checkpoint.
    CHECKPOINT_UPLOAD = "checkpoint_upload"
    PROJECT_ASSIGN = "project_assign"
    APIKEY_REVOKE = "apikey_revoke"
    APIKEY_CREATE = "apikey_create"
    #: Events from here on are the operator's only.
    TENANT_CREATE = "tenant_create"
    TENANT_LIMITS = "tenant_limits"
    TENANT_WEIGHT = "tenant_weight"
    TENANT_PAUSE = "tenant_pause"
    TENANT_RESUME = "tenant_resume"
    RUN_PAUSE = "run_pause"
    RUN_RESUME = "run_resume"
    RUN_CLOSE = "run_close"
    RUN_MOVE = "run_move"
    #: Change of a note or tags; this event and the next two are a tenant's.
    RUN_LABEL = "run_label"
    WEBHOOK_SET = "webhook_set"
    WEBHOOK_REMOVE = "webhook_remove"
    WORKER_DRAIN = "worker_drain"
    WORKER_UNDRAIN = "worker_undrain"
    WORKER_SELF_CHECK = "worker_self_check"


@dataclass
class Act:
    """An act in progress, already recorded in the log."""

    is_done: bool = True  # set to False by the caller if nothing changed


class Audit:
    """Writer and reader of the audit logs: one of each tenant, and one of all acts.

    An act is recorded before it is done: a crash in between leaves one line too many, never one too few.
    """

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._append = async_script(connection, "audit")

    def act(
        self, tenant: Tenant, event: AuditEvent, details: Mapping[str, str | int | None]
    ) -> AbstractAsyncContextManager[Act]:
        """Record a tenant's act within the block; `details` of a checkpoint contain its `tinker_path`."""
        return self._recorded(tenant.id, event, details, tenant.key_id, tenant.name)

    def act_of_operator(
        self, tenant: TenantId | None, event: AuditEvent, details: Mapping[str, str | float | None]
    ) -> AbstractAsyncContextManager[Act]:
        """Record the operator's act within the block, with the tenant that it concerns, if any."""
        return self._recorded(tenant, event, details, OPERATOR, OPERATOR)

    @asynccontextmanager
    async def _recorded(
        self,
        tenant: TenantId | None,
        event: AuditEvent,
        details: Mapping[str, str | float | None],
        key_id: str,
        key_name: str,
    ) -> AsyncIterator[Act]:
        """Write a line; delete it again if the store refuses the act or nothing changed."""
        lines = await self._write(tenant, event, details, key_id, key_name)
        act = Act()
        try:
            yield act
        except StoreError as refused:
            # An unavailable store may have done the act.
            act.is_done = isinstance(refused, StoreUnavailable)
            raise
        finally:
            if not act.is_done:
                for stream, line in lines.items():
                    await self._redis.xdel(stream, line)

    async def _write(
        self,
        tenant: TenantId | None,
        event: AuditEvent,
        details: Mapping[str, str | float | None],
        key_id: str,
        key_name: str,
    ) -> dict[str, bytes]:
        """Write a line into each of its streams; return their ids."""
        streams = [redis_keys.audit_of_all(), *([redis_keys.audit(tenant)] if tenant else [])]
        args = {
            "streams": streams, "event": str(event), "details": json.dumps(dict(details)), "tenant": tenant or "",
            "key_id": key_id, "key_name": key_name, "kept": EVENTS_KEPT,
        }  # fmt: skip
        return dict(zip(streams, await self._append(args), strict=True))

    async def page(self, tenant: TenantId | None, before: str | None, limit: int) -> list[AuditEntry]:
        """Return events, newest first, of one tenant or of all. `before` is the id of the last event already read."""
        name = redis_keys.audit(tenant) if tenant else redis_keys.audit_of_all()
        rows = await self._redis.xrevrange(name, f"({before}" if before else "+", "-", limit)
        return [_entry(entry, fields) for entry, fields in rows]

    async def entries(self, tenant: TenantId, day: date, resource: str = "") -> list[AuditEntry]:
        """Return the events of one day (UTC), oldest first, optionally of one resource."""
        start_ms = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000
        first, last = max(0, start_ms), max(0, start_ms + _DAY_MS - 1)
        rows = await self._redis.xrange(redis_keys.audit(tenant), first, last)
        entries = [_entry(name, fields) for name, fields in rows]
        return [entry for entry in entries if entry.event.startswith(f"{resource}_" if resource else "")]


def _entry(name: bytes, fields: Mapping[bytes, bytes]) -> AuditEntry:
    """Return one entry of the stream; its name starts with the time in ms."""
    tenant, key_id, key_name = (fields.get(field, b"").decode() for field in (b"tenant", b"key_id", b"key_name"))
    event, details = fields[b"event"].decode(), json.loads(fields[b"details"])
    return AuditEntry(
        id=name.decode(), at=int(name.partition(b"-")[0]) / 1000, event=event, tenant=tenant,
        key_id=key_id, key_name=key_name, details=details,
    )  # fmt: skip
