"""Tenants, their limits and their weight; hold them back and let them go on."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from cotrain.wire.admin import KeyRequest, NewKey, PauseRequest, TenantDetail, TenantList
from cotrain_server.administration.tenant_grants import (
    TenantChange,
    change_tenant,
    find_tenant,
    pause_tenant,
    resume_tenant,
)
from cotrain_server.administration.tenant_keys import make_key
from cotrain_server.administration.tenant_view import list_tenants, show_tenant
from cotrain_server.http.dependencies import Limit, Offset, ServicesDep, api_key
from cotrain_server.http.operator_routes import OperatorRoute

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
