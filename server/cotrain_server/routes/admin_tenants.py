"""Endpoints of the operator for tenants: limits, weights, pausing, API keys and the audit log."""

from typing import Annotated

from fastapi import Query

from cotrain.wire import admin as wire
from cotrain_server.administration import (
    TenantChange,
    change_tenant,
    find_tenant,
    list_keys,
    list_tenants,
    make_key,
    show_tenant,
)
from cotrain_server.http.tenant_routes import Limit, Offset, ServicesDep, operator_router
from cotrain_store.errors import Reason, Refused
from cotrain_store.tenants.audit_log import AuditEvent

router = operator_router("/api/v1/admin/tenants")


@router.get("")
async def tenants(
    services: ServicesDep, search: Annotated[str, Query(max_length=64)] = "", limit: Limit = 100, offset: Offset = 0
) -> wire.TenantList:
    """List tenants by name; with `search`, only those whose name or id contains it."""
    return await list_tenants(services, search, offset, limit)


@router.post("")
async def create(wanted: wire.KeyRequest, services: ServicesDep) -> wire.NewKey:
    """Create a tenant and its first key. The tenant is named after the key."""
    return await make_key(services, None, wanted)


@router.get("/{tenant_id}")
async def show(tenant_id: str, services: ServicesDep) -> wire.TenantDetail:
    """Show a tenant: limits and their use, usage by day, keys."""
    return await show_tenant(services, await find_tenant(services, tenant_id))


@router.patch("/{tenant_id}")
async def change(tenant_id: str, wanted: TenantChange, services: ServicesDep) -> wire.TenantDetail:
    """Set limits that override the defaults, and a weight. Omitted fields keep their values; null restores the default."""
    tenant = await find_tenant(services, tenant_id)
    await change_tenant(services, tenant, wanted)
    return await show_tenant(services, tenant)


@router.post("/{tenant_id}/pause", status_code=204)
async def pause(tenant_id: str, wanted: wire.PauseRequest, services: ServicesDep) -> None:
    """Pause a tenant: its requests are accepted up to its limits, but no cycle or sampling takes them."""
    tenant, details = await find_tenant(services, tenant_id), {"reason": wanted.reason}
    async with services.audit.act_of_operator(tenant, AuditEvent.TENANT_PAUSE, details):
        await services.pauses.pause_tenant(tenant, wanted.reason)


@router.post("/{tenant_id}/resume", status_code=204)
async def resume(tenant_id: str, services: ServicesDep) -> None:
    """Resume a tenant. Idempotent."""
    tenant = await find_tenant(services, tenant_id)
    async with services.audit.act_of_operator(tenant, AuditEvent.TENANT_RESUME, {}) as act:
        act.is_done = await services.pauses.resume_tenant(tenant)


keys_router = operator_router("/api/v1/admin/tenants/{tenant_id}/keys")


@keys_router.get("")
async def keys(tenant_id: str, services: ServicesDep) -> list[wire.KeyShown]:
    """List a tenant's keys, oldest first, without their secrets."""
    return await list_keys(services, await find_tenant(services, tenant_id))


@keys_router.post("")
async def create_key(tenant_id: str, wanted: wire.KeyRequest, services: ServicesDep) -> wire.NewKey:
    """Create another key of a tenant. Only this answer contains its secret."""
    return await make_key(services, await find_tenant(services, tenant_id), wanted)


@keys_router.delete("/{key_id}", status_code=204)
async def revoke(tenant_id: str, key_id: str, services: ServicesDep) -> None:
    """Revoke a key, effective everywhere within 5 s. A key in the server's settings must be removed there."""
    tenant = await find_tenant(services, tenant_id)
    known = await services.tenants.issued_key(key_id)
    if known and known.tenant != tenant:
        raise Refused(Reason.KEY_NOT_FOUND)
    details = {"revoked": key_id, "name": known.name if known else ""}
    async with services.audit.act_of_operator(tenant, AuditEvent.APIKEY_REVOKE, details):
        if not await services.tenants.revoke(key_id) or not known:
            raise Refused(Reason.KEY_NOT_FOUND)


audit_router = operator_router("/api/v1/admin/audit")


@audit_router.get("")
async def audit(
    services: ServicesDep,
    tenant: Annotated[str | None, Query(max_length=128)] = None,
    before: Annotated[str | None, Query(pattern=r"^[0-9]{1,15}-[0-9]{1,15}$")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> wire.AuditPage:
    """List actions of tenants and of the operator, newest first: all, or those about one tenant."""
    about = None if tenant is None else await find_tenant(services, tenant)
    found = await services.audit.page(about, before, limit)
    return wire.AuditPage(
        events=[entry if entry.tenant else entry.model_copy(update={"tenant": tenant or ""}) for entry in found],
        next=found[-1].id if len(found) == limit else None,
    )
