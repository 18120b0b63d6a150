"""Webhooks: the address of each tenant, and its events until they are delivered.

The script that causes an event also writes it (`scripts/lib/webhook_event.lua`), so no crash loses
one. One process delivers at a time, and its epoch fences its writes. An attempt without a recorded
outcome is repeated: delivery is at least once.
"""

import secrets
import time
from base64 import b64encode
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from cotrain.wire.usage import Webhook
from cotrain_store import redis_keys
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script

_COUNTS = ("delivered", "retried", "given_up", "dropped")
SECRET_PREFIX = "whsec_"  # noqa: S105  # how the secret begins, and none


class Outcome(StrEnum):
    """Outcome of an attempt to deliver an event."""

    #: Answered with 2xx.
    DELIVERED = "delivered"
    #: Will be tried again later.
    RETRIED = "retried"
    #: Failed for a day.
    GIVEN_UP = "given_up"


@dataclass(frozen=True)
class DueEvent:
    """An event that is due for delivery."""

    tenant: TenantId
    url: str
    secret: str
    id: str
    body: bytes
    attempts: int  # number of earlier attempts
    age_s: float


class Webhooks:
    """Webhooks of tenants, for one process."""

    def __init__(self, connection: Connection, process: str) -> None:
        """Create the access of a process; `process` is a unique id of this process."""
        self._redis = connection
        self._process = process
        self._epoch = ""
        self._lease = async_script(connection, "lease")
        self._queue_test = async_script(connection, "webhook_test")
        self._due = async_script(connection, "webhook_due")
        self._tried = async_script(connection, "webhook_tried")
        self._remove = async_script(connection, "webhook_remove")

    # ---- Of a tenant -----------------------------------------------------------------------------

    async def set(self, tenant: TenantId, url: str, drift_above: float | None = None) -> str:
        """Set the address of the tenant's events; return the new secret, which is not shown
        again. Passes with a mean rollout gap above `drift_above` nats cause an event.
        """
        secret = SECRET_PREFIX + b64encode(secrets.token_bytes(32)).decode()
        row = {"url": url, "secret": secret, "created_at": repr(time.time())}
        name = redis_keys.webhook(tenant)
        if drift_above is None:
            await self._redis.hdel(name, "drift_above")
        else:
            row["drift_above"] = repr(drift_above)
        await self._redis.hset(name, mapping=row)
        # Last, because events are recorded once it exists.
        await self._redis.hsetnx(name, "id", secrets.token_hex(8))
        return secret

    async def find(self, tenant: TenantId) -> Webhook:
        """Return a tenant's webhook, without its secret; raises WEBHOOK_NOT_FOUND."""
        row = await self._redis.hgetall(redis_keys.webhook(tenant))
        if not row:
            raise Refused(Reason.WEBHOOK_NOT_FOUND)
        text = {name.decode(): value.decode() for name, value in row.items()}
        last_at = text.get("last_at")
        return Webhook(
            url=text["url"],
            drift_above=float(text["drift_above"]) if "drift_above" in text else None,
            created_at=datetime.fromtimestamp(float(text["created_at"]), UTC),
            waiting=int(await self._redis.hlen(redis_keys.events(tenant))),
            last_at=datetime.fromtimestamp(float(last_at), UTC) if last_at else None,
            **{name: int(text.get(name, 0)) for name in _COUNTS},
            **{name: text.get(name) or None for name in ("last_event", "last_outcome", "last_answer")},
        )

    async def remove(self, tenant: TenantId) -> None:
        """Delete a tenant's webhook and its events; raises WEBHOOK_NOT_FOUND."""
        if not await self._remove({"tenant": tenant}):
            raise Refused(Reason.WEBHOOK_NOT_FOUND)

    async def test(self, tenant: TenantId) -> str:
        """Send a test event; return its id. Raises WEBHOOK_NOT_FOUND, or WEBHOOK_FULL."""
        args = {"tenant": tenant, "kind": "test", "data": {"sent_by": "cotrain"}}
        event: bytes = await self._queue_test(args)
        if event == b"NONE":
            raise Refused(Reason.WEBHOOK_NOT_FOUND)
        if event == b"FULL":
            raise Refused(Reason.WEBHOOK_FULL)
        return event.decode()

    # ---- Of the process that delivers ------------------------------------------------------------

    @property
    def _own(self) -> dict[str, str]:
        """Arguments of a script that only the sender may run."""
        return {"fence": redis_keys.webhook_epoch(), "epoch": self._epoch}

    async def lead(self) -> bool:
        """Acquire or renew the lease of the sender. Return True if this process holds it."""
        args = {"lease": redis_keys.webhook_lease(), "name": self._process, "ttl_ms": redis_keys.WEBHOOK_LEASE_MS}
        answer = await self._lease({**self._own, **args})
        self._epoch = answer.decode()
        return bool(self._epoch)

    async def due(self, count: int) -> list[DueEvent]:
        """Return the next due event of each of at most `count` tenants, longest due first; raises Fenced."""
        return await self._read({**self._own, "most": count})

    async def due_of(self, tenant: TenantId) -> DueEvent | None:
        """Return a tenant's next due event; raises Fenced."""
        found = await self._read({**self._own, "tenant": tenant})
        return found[0] if found else None

    async def tried(self, event: DueEvent, outcome: Outcome, answer: str, retry_in_s: float = 0.0) -> None:
        """Record the outcome of an attempt; `retry_in_s` applies to `RETRIED` only. Raises Fenced."""
        args: dict[str, Any] = {
            **self._own, "tenant": event.tenant, "event": event.id, "outcome": outcome, "answer": answer,
        }  # fmt: skip
        if outcome is Outcome.RETRIED:
            args["retry_in_ms"] = int(retry_in_s * 1000)
        await self._tried(args)

    async def _read(self, args: dict[str, Any]) -> list[DueEvent]:
        rows = await self._due(args)
        return [_due_event(*row) for row in rows]


def _due_event(tenant: bytes, url: bytes, secret: bytes, event: bytes, stored: bytes, now_ms: bytes) -> DueEvent:
    came_ms, attempts, body = stored.split(b"|", 2)
    return DueEvent(
        tenant=TenantId(tenant.decode()),
        url=url.decode(),
        secret=secret.decode(),
        id=event.decode(),
        body=body,
        attempts=int(attempts),
        age_s=(int(now_ms) - int(came_ms)) / 1000,
    )
