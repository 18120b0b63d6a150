"""What routes ask for by type: the services, the tenant, and which part of a list."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.security import APIKeyHeader

from cotrain.wire.rest import MAX_PAGE, AccessScope
from cotrain_server.services import Services
from cotrain_store.messages.sessions import Tenant

#: For the OpenAPI page; the check itself is made before the route.
api_key = Security(APIKeyHeader(name="X-API-Key", auto_error=False))


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def _tenant(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


ServicesDep = Annotated[Services, Depends(_services)]
TenantDep = Annotated[Tenant, Depends(_tenant)]

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
Scope = Annotated[AccessScope, Query()]
