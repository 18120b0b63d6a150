"""The keys of a tenant: its members and viewers."""

from __future__ import annotations

from fastapi import APIRouter

from cotrain.wire.admin import KeyRequest, KeyShown, NewKey
from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.administration.tenant_keys import list_keys, make_key, revoke_key
from cotrain_server.http.dependencies import ServicesDep, api_key
from cotrain_server.http.operator_routes import OperatorRoute

router = APIRouter(
    prefix="/api/v1/admin/tenants/{tenant_id}/keys",
    tags=["admin"],
    route_class=OperatorRoute,
    dependencies=[api_key],
)


@router.get("")
async def keys(tenant_id: str, services: ServicesDep) -> list[KeyShown]:
    """List a tenant's keys, oldest first, without their secrets."""
    return await list_keys(services, await find_tenant(services, tenant_id))


@router.post("")
async def create(tenant_id: str, wanted: KeyRequest, services: ServicesDep) -> NewKey:
    """Make one more key of a tenant. Its secret is in this answer and never again."""
    return await make_key(services, await find_tenant(services, tenant_id), wanted)


@router.delete("/{key_id}", status_code=204)
async def revoke(tenant_id: str, key_id: str, services: ServicesDep) -> None:
    """End a key, within five seconds everywhere; one of the server's settings is taken back there."""
    await revoke_key(services, await find_tenant(services, tenant_id), key_id)
