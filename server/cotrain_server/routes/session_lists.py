"""Sessions as their tenant sees them afterwards: which there were, what is in them, their project."""

from __future__ import annotations

from fastapi import APIRouter

from cotrain.wire.rest import (
    AssignProjectRequest,
    GetSessionResponse,
    ListSessionsResponse,
)
from cotrain_server.http.dependencies import (
    Limit,
    Offset,
    Scope,
    ServicesDep,
    TenantDep,
    api_key,
)
from cotrain_server.http.tenant_routes import TenantRoute
from cotrain_server.views.records import text_by_name
from cotrain_store.tenants.audit_log import AuditEvent

router = APIRouter(
    prefix="/api/v1", tags=["lists"], route_class=TenantRoute, dependencies=[api_key]
)


@router.get("/sessions")
async def list_sessions(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
) -> ListSessionsResponse:
    """List your sessions, newest first. Those of other tenants are not accessible."""
    return ListSessionsResponse(
        sessions=list(await services.catalog.sessions(tenant.id, offset, limit))
    )


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, services: ServicesDep, tenant: TenantDep, access_scope: Scope = "owned"
) -> GetSessionResponse:
    """Show what is in a session: its runs, and its samplers as long as they live."""
    session = await services.records.session(tenant.id, session_id)
    samplers = await services.records.samplers_of(session.id)
    return GetSessionResponse(
        training_run_ids=list(await services.catalog.session_runs(session.id)),
        sampler_ids=[sampler.id for sampler in samplers],
        user_metadata=text_by_name(session.user_metadata),
        display_name=session.display_name,
    )


@router.put("/sessions/{session_id}/project", status_code=204)
async def assign_session_project(
    session_id: str, request: AssignProjectRequest, services: ServicesDep, tenant: TenantDep
) -> None:
    """Put a session, with its runs and samplers, into a project.

    A project is a name that you give; it exists by being given.
    """
    details = {"session_id": session_id, "project_id": request.project_id}
    async with services.audit.act(tenant, AuditEvent.PROJECT_ASSIGN, details):
        await services.records.assign_project(tenant.id, session_id, request.project_id)
