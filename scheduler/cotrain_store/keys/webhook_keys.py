"""The keys of webhooks: where a tenant wants to be notified of its events, and those that it was not notified of yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import TenantId

#: Who delivers is followed by another process when it has not said for so long that it lives.
LEASE_MS = 10_000


def webhook(tenant: TenantId) -> str:
    """Name the hash of a tenant's webhook: id, url, secret, and what became of its events; until removed."""
    return f"cotrain:tenant:{tenant}:webhook"


def events(tenant: TenantId) -> str:
    """Name the hash event id → when it came (ms), attempts and body; a field goes when it is over."""
    return f"cotrain:tenant:{tenant}:webhook_events"


def due_events(tenant: TenantId) -> str:
    """Name the sorted set of those events (score: when to send it next, in ms of the store's clock)."""
    return f"cotrain:tenant:{tenant}:webhook_due"


def due_tenants() -> str:
    """Name the sorted set of tenants with events (score: when the first one is due, in ms)."""
    return "cotrain:webhooks:due"


def lease() -> str:
    """Name who delivers; expires unless renewed."""
    return "cotrain:webhooks:lease"


def epoch() -> str:
    """Name the number of the newest process that delivers; lives permanently, only grows."""
    return "cotrain:webhooks:epoch"
