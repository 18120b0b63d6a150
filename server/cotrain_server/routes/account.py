"""Endpoints of a tenant for itself: its API key, usage, audit log and webhook.

Usage has the format of the hosted services' billing, and our own. Nothing has a price. Storage per hour is not
reported, because checkpoints that were deleted or have expired since would be missing. Current storage is reported.
"""

import hashlib
import time
from collections import defaultdict
from datetime import UTC, date, datetime
from typing import Annotated, Literal
from urllib.parse import urlsplit

from fastapi import Query, Request

from cotrain.wire import usage as wire
from cotrain.wire.checkpoints import ApiKeyResponse, KeyDetails, OrganizationDetails, UserDetails
from cotrain.wire.model import Name
from cotrain.wire.sessions import AuthTokenResponse
from cotrain_server.errors import Invalid
from cotrain_server.http.auth import is_token, shown_key
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, tenant_router
from cotrain_server.services import Services
from cotrain_server.signed_tokens import Token
from cotrain_server.views.records import text_by_name, utc
from cotrain_server.views.usage import events_of, last_day, sources_of, total_of, window
from cotrain_store.errors import InvalidKey, Reason, Refused
from cotrain_store.messages.ids import SessionId
from cotrain_store.messages.runs import Tenant
from cotrain_store.results.delivery_log import unread_bytes
from cotrain_store.tenants.api_keys import KeyRecord
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.policies import run_bytes
from cotrain_store.tenants.session_search import Stored

keys_router = tenant_router("auth", "/api/v1/auth")


@keys_router.post("/token")
async def exchange(request: Request, services: ServicesDep) -> AuthTokenResponse:
    """Return a token that replaces the sent API key for one hour, or until the key is revoked."""
    key = await _shown(request, services)
    token = Token(key.tenant, key.id, key.name)
    return AuthTokenResponse(jwt=services.signer.make_token(token, time.time()))


@keys_router.get("/apikey/me")
async def show_key(request: Request, services: ServicesDep) -> ApiKeyResponse:
    """Describe the sent API key. This server has tenants, but no users within them."""
    key = await _shown(request, services)
    return ApiKeyResponse(
        key_id=_number(key.id),
        name=key.name,
        note="in the server's settings" if key.in_settings else f"cotrain keys revoke {key.id}",
        details=KeyDetails(org_details=OrganizationDetails(name=key.tenant), user_details=UserDetails(email=key.name)),
    )


@keys_router.delete("/apikey/me", status_code=204)
async def revoke_key(request: Request, services: ServicesDep) -> None:
    """Revoke the sent API key and every token issued for it, effective within 5 s.

    Other keys of the same tenant stay valid. A key in the server's settings cannot be revoked here,
    and stays valid while it is configured.
    """
    key = await _shown(request, services)
    if key.in_settings:
        raise Refused(Reason.KEY_OF_THE_OPERATOR)
    owner = Tenant(key.tenant, key.name, key.id)
    async with services.audit.act(owner, AuditEvent.APIKEY_REVOKE, {"key_id": key.id}):
        await services.tenants.revoke(key.id)


async def _shown(request: Request, services: Services) -> KeyRecord:
    """Return the key of a request. A token can neither issue tokens nor revoke its key."""
    credential = shown_key(request)
    if is_token(credential):
        raise InvalidKey("Show the API key itself here, not a token.")
    return await services.tenants.key(credential)


def _number(key_id: str) -> int:
    """Return a number for a key's id, because the SDK's CLI stores it as a number."""
    return int.from_bytes(hashlib.sha256(key_id.encode()).digest()[:6])


usage_router = tenant_router("usage")


@usage_router.get("/billing/usage/events")
async def billing_usage(
    starting_on: datetime, ending_before: datetime, services: ServicesDep, tenant: TenantDep
) -> wire.BillingUsageResponse:
    """Return the usage of each session by the hour. Whole hours in UTC, at most 14 days."""
    period = window(starting_on, ending_before, datetime.now(UTC))
    rows = await services.usage.rows(tenant.id, period.start, period.end)
    names = {SessionId(row.session) for row in rows if row.session}
    sessions = await services.catalog.session_records(names)
    return wire.BillingUsageResponse(
        data=events_of(rows, sessions, tenant),
        sessions={
            name: wire.UsageSession(user_metadata=text_by_name(session.user_metadata))
            for name, session in sessions.items()
        },
    )


@usage_router.get("/billing/usage/checkpoints/current")
async def checkpoint_storage(
    services: ServicesDep, tenant: TenantDep, project_id: Name | None = None
) -> wire.StorageResponse:
    """Return the current checkpoint storage of each project. Each checkpoint counts in full, even if it shares files."""
    by_project = await _stored_by_project(services, tenant)
    return wire.StorageResponse(
        data=[
            wire.StorageItem(
                project_id=project,
                org_user_urn=tenant.id,
                user_name=tenant.name,
                checkpoint_count=stored.count,
                size_bytes=stored.size_bytes,
                size_gigabytes=stored.size_bytes / 1e9,
            )
            for project, stored in sorted(by_project.items(), key=lambda item: item[0] or "")
            if project_id in (None, project)
        ]
    )


@usage_router.get("/usage")
async def usage(
    services: ServicesDep, tenant: TenantDep, starting_on: datetime | None = None, ending_before: datetime | None = None
) -> wire.UsageResponse:
    """Return your usage and accelerator seconds, in total and by run and sampler, and your current storage.

    Whole hours in UTC, at most 14 days. Without `starting_on` and `ending_before`, the last 24 hours.
    """
    now = datetime.now(UTC)
    if starting_on is None and ending_before is None:
        period = last_day(now)
    elif starting_on is None or ending_before is None:
        raise Invalid("starting_on and ending_before are needed together.")
    else:
        period = window(starting_on, ending_before, now)
    rows = await services.usage.rows(tenant.id, period.start, period.end)
    return wire.UsageResponse(
        starting_on=period.start,
        ending_before=period.end,
        total=total_of(rows),
        sources=sources_of(rows),
        stored=await _stored(services, tenant),
    )


async def _stored(services: Services, tenant: Tenant) -> wire.StoredBytes:
    _, checkpoints = await services.checkpoints.stored_bytes(tenant.id)
    unread = await unread_bytes(services.connection, [tenant.id])
    return wire.StoredBytes(
        runs=await run_bytes(services.connection, tenant.id), checkpoints=checkpoints, unread=unread[tenant.id]
    )


async def _stored_by_project(services: Services, tenant: Tenant) -> dict[str | None, Stored]:
    by_session = await services.session_search.stored(tenant.id)
    sessions = await services.catalog.session_records(by_session)
    by_project: defaultdict[str | None, Stored] = defaultdict(Stored)
    for session, stored in by_session.items():
        by_project[sessions[session].project_id] += stored
    return dict(by_project)


EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@usage_router.get("/audit")
async def audit_log(
    services: ServicesDep, tenant: TenantDep, event_type: Annotated[EventType, Query()] = "all", day: date | None = None
) -> wire.AuditLogResponse:
    """Return the audit log of one day (UTC; default today), oldest first. There are no teams or organizations."""
    resource = "" if event_type == "all" else event_type.removesuffix("s")
    entries = await services.audit.entries(tenant.id, day or datetime.now(UTC).date(), resource)
    return wire.AuditLogResponse(
        entries=[
            wire.AuditLogEntry(
                timestamp=utc(entry.at),
                event=entry.event,
                event_details={**entry.details, "key_id": entry.key_id, "key_name": entry.key_name},
                tinker_path=entry.details.get("tinker_path"),
            )
            for entry in entries
        ]
    )


webhook_router = tenant_router("webhooks")


@webhook_router.put("/webhook")
async def set_webhook(request: wire.SetWebhookRequest, services: ServicesDep, tenant: TenantDep) -> wire.NewWebhook:
    """Set the URL for your events. The secret is new, and only this answer contains it."""
    _check_url(request.url, may_be_plain=bool(services.settings.webhook_networks))
    details = {"host": urlsplit(request.url).netloc}
    async with services.audit.act(tenant, AuditEvent.WEBHOOK_SET, details):
        secret = await services.webhooks.set(tenant.id, request.url, request.drift_above)
    return wire.NewWebhook(url=request.url, secret=secret)


@webhook_router.get("/webhook")
async def get_webhook(services: ServicesDep, tenant: TenantDep) -> wire.Webhook:
    """Show your webhook and its delivery statistics."""
    return await services.webhooks.find(tenant.id)


@webhook_router.delete("/webhook")
async def remove_webhook(services: ServicesDep, tenant: TenantDep) -> wire.WebhookRemoved:
    """Remove your webhook and its undelivered events."""
    async with services.audit.act(tenant, AuditEvent.WEBHOOK_REMOVE, {}):
        await services.webhooks.remove(tenant.id)
    return wire.WebhookRemoved()


@webhook_router.post("/webhook/test")
async def test_webhook(services: ServicesDep, tenant: TenantDep) -> wire.WebhookTest:
    """Queue an event of type `test`, which is delivered like any other."""
    return wire.WebhookTest(event_id=await services.webhooks.test(tenant.id))


def _check_url(url: str, *, may_be_plain: bool) -> None:
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
