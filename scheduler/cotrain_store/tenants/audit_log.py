"""What each tenant changed, shared or took away, and when: the last 10,000 or so events of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from cotrain_store.keys import tenant_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages.ids import TenantId
    from cotrain_store.redis_client.connection import Connection

#: Redis cuts in whole nodes of its stream, so somewhat more are kept.
EVENTS_KEPT = 10_000

_DAY_MS = 24 * 3600 * 1000


class AuditEvent(StrEnum):
    """What is noted, named `<resource>_<action>` as the hosted services do."""

    CHECKPOINT_DELETE = "checkpoint_delete"
    CHECKPOINT_PUBLISH = "checkpoint_publish"
    CHECKPOINT_UNPUBLISH = "checkpoint_unpublish"
    CHECKPOINT_SET_TTL = "checkpoint_set_ttl"
    CHECKPOINT_COPY = "checkpoint_copy"
    #: Download links were given out.
    CHECKPOINT_READ = "checkpoint_read"
    #: A foreign adapter became a checkpoint.
    CHECKPOINT_UPLOAD = "checkpoint_upload"
    PROJECT_ASSIGN = "project_assign"
    APIKEY_REVOKE = "apikey_revoke"


@dataclass(frozen=True)
class AuditEntry:
    """One event."""

    at: datetime
    event: str
    details: dict[str, Any]


class Audit:
    """Write and read a tenant's audit log."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def note(
        self, tenant: TenantId, event: AuditEvent, details: Mapping[str, str | int | None]
    ) -> None:
        """Note what was just done. A process that dies right before leaves it out of the log.

        `details` of a checkpoint hold its `tinker_path`.
        """
        row = {"event": str(event), "details": json.dumps(dict(details))}
        await self._redis.xadd(tenant_keys.audit(tenant), row, maxlen=EVENTS_KEPT, approximate=True)

    async def entries(self, tenant: TenantId, day: date, resource: str = "") -> list[AuditEntry]:
        """Read the events of one day (UTC), oldest first; of one resource where it is named."""
        start_ms = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000
        first, last = max(0, start_ms), max(0, start_ms + _DAY_MS - 1)
        rows = await self._redis.xrange(tenant_keys.audit(tenant), first, last)
        entries = [_entry(name, fields) for name, fields in rows]
        return [
            entry for entry in entries if entry.event.startswith(f"{resource}_" if resource else "")
        ]


def _entry(name: bytes, fields: Mapping[bytes, bytes]) -> AuditEntry:
    """Read one entry of the stream; its name starts with the time in ms."""
    at = datetime.fromtimestamp(int(name.partition(b"-")[0]) / 1000, UTC)
    return AuditEntry(at, fields[b"event"].decode(), json.loads(fields[b"details"]))
