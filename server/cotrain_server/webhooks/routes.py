"""The webhook of a tenant: where it wants to be notified of its events."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import urlsplit

from fastapi import APIRouter

from cotrain.wire.usage import (
    NewWebhook,
    SetWebhookRequest,
    Webhook,
    WebhookRemoved,
    WebhookTest,
)
from cotrain_server.errors import Invalid
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, TenantRoute, api_key
from cotrain_store.tenants.audit_log import AuditEvent

router = APIRouter(
    prefix="/api/v1", tags=["webhooks"], route_class=TenantRoute, dependencies=[api_key]
)


@router.put("/webhook")
async def set_webhook(
    request: SetWebhookRequest, services: ServicesDep, tenant: TenantDep
) -> NewWebhook:
    """Send your events to this address from now on. The secret is new, and shown here alone."""
    check_url(request.url, may_be_plain=bool(services.settings.webhook_networks))
    details = {"host": urlsplit(request.url).netloc}
    async with services.audit.act(tenant, AuditEvent.WEBHOOK_SET, details):
        secret = await services.webhooks.set(tenant.id, request.url)
    return NewWebhook(url=request.url, secret=secret)


@router.get("/webhook")
async def get_webhook(services: ServicesDep, tenant: TenantDep) -> Webhook:
    """Show your webhook, and what became of its events."""
    found = await services.webhooks.find(tenant.id)
    return Webhook(
        url=found.url,
        created_at=datetime.fromtimestamp(found.created_at, UTC),
        waiting=found.waiting,
        delivered=found.delivered,
        retried=found.retried,
        given_up=found.given_up,
        dropped=found.dropped,
        last_event=found.last_event or None,
        last_outcome=found.last_outcome or None,
        last_answer=found.last_answer or None,
        last_at=None if found.last_at is None else datetime.fromtimestamp(found.last_at, UTC),
    )


@router.delete("/webhook")
async def remove_webhook(services: ServicesDep, tenant: TenantDep) -> WebhookRemoved:
    """Remove your webhook, with the events that it was not notified of yet."""
    async with services.audit.act(tenant, AuditEvent.WEBHOOK_REMOVE, {}):
        await services.webhooks.remove(tenant.id)
    return WebhookRemoved()


@router.post("/webhook/test")
async def test_webhook(services: ServicesDep, tenant: TenantDep) -> WebhookTest:
    """Send an event of type `test`, in the way of all others."""
    return WebhookTest(event_id=await services.webhooks.test(tenant.id))


def check_url(url: str, *, may_be_plain: bool) -> None:
    """Refuse what is no address of a webhook; raises Invalid."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise Invalid("url: it is none.") from None
    schemes = ("https", "http") if may_be_plain else ("https",)
    if parts.scheme not in schemes:
        raise Invalid(f"url: it must begin with {' or '.join(f'{each}://' for each in schemes)}.")
    if not host or not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise Invalid("url: it must name a host, and hold visible ASCII characters alone.")
    if parts.username is not None or parts.fragment:
        raise Invalid("url: it must name no user, no password and no fragment.")
