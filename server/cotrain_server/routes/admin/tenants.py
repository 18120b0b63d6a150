"""Tenants, their limits and their weight; hold them back and let them go on.

The keys of a tenant: its members and viewers.

Who did what, by the key it was done with.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from cotrain.wire.admin import (
    AuditEvent,
    AuditPage,
    KeyRequest,
    KeyShown,
    NewKey,
    PauseRequest,
    TenantDetail,
    TenantList,
)
from cotrain_server.administration.tenant_grants import (
    TenantChange,
    change_tenant,
    find_tenant,
    list_keys,
    make_key,
    pause_tenant,
    resume_tenant,
    revoke_key,
)
from cotrain_server.administration.tenant_view import list_tenants, show_tenant
from cotrain_server.http.tenant_routes import Limit, Offset, OperatorRoute, ServicesDep, api_key

router = APIRouter(
    prefix="/api/v1/admin/tenants",
    tags=["admin"],
    route_class=OperatorRoute,
    dependencies=[api_key],
)


@router.get("")
async def tenants(
    services: ServicesDep,
    search: Annotated[str, Query(max_length=64)] = "",
    limit: Limit = 100,
    offset: Offset = 0,
) -> TenantList:
    """List tenants by name, those with `search` in their name or id."""
    return await list_tenants(services, search, offset, limit)


@router.post("")
async def create(wanted: KeyRequest, services: ServicesDep) -> NewKey:
    """Make a tenant, with its first key: it is named after that."""
    return await make_key(services, None, wanted)


@router.get("/{tenant_id}")
async def show(tenant_id: str, services: ServicesDep) -> TenantDetail:
    """Show a tenant: limits with what is used of them, usage by day, keys."""
    return await show_tenant(services, await find_tenant(services, tenant_id))


@router.patch("/{tenant_id}")
async def change(tenant_id: str, wanted: TenantChange, services: ServicesDep) -> TenantDetail:
    """Set limits over the default ones, and a weight. What is not named stays; null is the default."""
    tenant = await find_tenant(services, tenant_id)
    await change_tenant(services, tenant, wanted)
    return await show_tenant(services, tenant)


@router.post("/{tenant_id}/pause", status_code=204)
async def pause(tenant_id: str, wanted: PauseRequest, services: ServicesDep) -> None:
    """Hold a tenant back: no cycle and no sampling takes its requests, which are accepted up to its limits."""
    await pause_tenant(services, await find_tenant(services, tenant_id), wanted.reason)


@router.post("/{tenant_id}/resume", status_code=204)
async def resume(tenant_id: str, services: ServicesDep) -> None:
    """Let a tenant go on. Twice is harmless."""
    await resume_tenant(services, await find_tenant(services, tenant_id))


keys_router = APIRouter(
    prefix="/api/v1/admin/tenants/{tenant_id}/keys",
    tags=["admin"],
    route_class=OperatorRoute,
    dependencies=[api_key],
)


@keys_router.get("")
async def keys(tenant_id: str, services: ServicesDep) -> list[KeyShown]:
    """List a tenant's keys, oldest first, without their secrets."""
    return await list_keys(services, await find_tenant(services, tenant_id))


@keys_router.post("")
async def create_key(tenant_id: str, wanted: KeyRequest, services: ServicesDep) -> NewKey:
    """Make one more key of a tenant. Its secret is in this answer and never again."""
    return await make_key(services, await find_tenant(services, tenant_id), wanted)


@keys_router.delete("/{key_id}", status_code=204)
async def revoke(tenant_id: str, key_id: str, services: ServicesDep) -> None:
    """End a key, within five seconds everywhere; one of the server's settings is taken back there."""
    await revoke_key(services, await find_tenant(services, tenant_id), key_id)


audit_router = APIRouter(
    prefix="/api/v1/admin/audit", tags=["admin"], route_class=OperatorRoute, dependencies=[api_key]
)


@audit_router.get("")
async def audit(
    services: ServicesDep,
    tenant: Annotated[str | None, Query(max_length=128)] = None,
    before: Annotated[str | None, Query(pattern=r"^[0-9]{1,15}-[0-9]{1,15}$")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditPage:
    """List acts of tenants and of the operator, newest first: all, or those about one tenant."""
    about = None if tenant is None else await find_tenant(services, tenant)
    found = await services.audit.page(about, before, limit)
    return AuditPage(
        events=[
            AuditEvent(
                id=entry.id,
                at=entry.at.timestamp(),
                event=entry.event,
                tenant=entry.tenant or tenant or "",
                key_id=entry.key_id,
                key_name=entry.key_name,
                details=entry.details,
            )
            for entry in found
        ],
        next=found[-1].id if len(found) == limit else None,
    )
