"""Endpoints for the webhook of a tenant."""

from urllib.parse import urlsplit

from cotrain.wire.usage import NewWebhook, SetWebhookRequest, Webhook, WebhookRemoved, WebhookTest
from cotrain_server.errors import Invalid
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, tenant_router
from cotrain_store.tenants.audit_log import AuditEvent

router = tenant_router("webhooks")


@router.put("/webhook")
async def set_webhook(request: SetWebhookRequest, services: ServicesDep, tenant: TenantDep) -> NewWebhook:
    """Set the URL for your events. The secret is new, and only this answer contains it."""
    check_url(request.url, may_be_plain=bool(services.settings.webhook_networks))
    details = {"host": urlsplit(request.url).netloc}
    async with services.audit.act(tenant, AuditEvent.WEBHOOK_SET, details):
        secret = await services.webhooks.set(tenant.id, request.url, request.drift_above)
    return NewWebhook(url=request.url, secret=secret)


@router.get("/webhook")
async def get_webhook(services: ServicesDep, tenant: TenantDep) -> Webhook:
    """Show your webhook and its delivery statistics."""
    return await services.webhooks.find(tenant.id)


@router.delete("/webhook")
async def remove_webhook(services: ServicesDep, tenant: TenantDep) -> WebhookRemoved:
    """Remove your webhook and its undelivered events."""
    async with services.audit.act(tenant, AuditEvent.WEBHOOK_REMOVE, {}):
        await services.webhooks.remove(tenant.id)
    return WebhookRemoved()


@router.post("/webhook/test")
async def test_webhook(services: ServicesDep, tenant: TenantDep) -> WebhookTest:
    """Queue an event of type `test`, which is delivered like any other."""
    return WebhookTest(event_id=await services.webhooks.test(tenant.id))


def check_url(url: str, *, may_be_plain: bool) -> None:
    """Raise Invalid if `url` is not a valid webhook URL."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise Invalid("url is not a valid URL.") from None
    schemes = ("https", "http") if may_be_plain else ("https",)
    if parts.scheme not in schemes:
        raise Invalid(f"url must start with {' or '.join(f'{each}://' for each in schemes)}.")
    if not host or not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise Invalid("url must have a host and only visible ASCII characters.")
    if parts.username is not None or parts.fragment:
        raise Invalid("url must not have a user, a password or a fragment.")
