"""Who did what, by the key it was done with."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from cotrain.wire.admin import AuditEvent, AuditPage
from cotrain_server.administration.tenant_grants import find_tenant
from cotrain_server.http.dependencies import ServicesDep, api_key
from cotrain_server.http.operator_routes import OperatorRoute

router = APIRouter(
    prefix="/api/v1/admin/audit", tags=["admin"], route_class=OperatorRoute, dependencies=[api_key]
)


@router.get("")
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
