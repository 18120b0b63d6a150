"""Endpoints for existing sessions: lists, search, content and project."""

from cotrain.wire.rest import (
    AssignProjectRequest,
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchRequest,
    SessionSearchResponse,
)
from cotrain_server.http.tenant_routes import Limit, Offset, Scope, ServicesDep, TenantDep, tenant_router
from cotrain_server.services import Services
from cotrain_server.views.records import text_by_name
from cotrain_server.views.session_search import cursor_at, matches, may_find, position_of, summary_of
from cotrain_store.messages.ids import TenantId
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.lists import Cursor, LabelQuery, SessionEntry, Stored

router = tenant_router("lists")

READ_AT_ONCE = 100
#: Maximum number of sessions examined for one page. A rare match may be several pages later.
LOOKED_AT = 2_000


@router.get("/sessions")
async def list_sessions(
    services: ServicesDep, tenant: TenantDep, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> ListSessionsResponse:
    """List your sessions, newest first. Sessions of other tenants are not accessible."""
    return ListSessionsResponse(sessions=list(await services.catalog.sessions(tenant.id, offset, limit)))


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, services: ServicesDep, tenant: TenantDep, access_scope: Scope = "owned"
) -> GetSessionResponse:
    """Show the content of a session: its runs, and its live samplers."""
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
    """Assign a session, with its runs and samplers, to a project.

    A project is only a name: it exists once a session is assigned to it.
    """
    details = {"session_id": session_id, "project_id": request.project_id}
    async with services.audit.act(tenant, AuditEvent.PROJECT_ASSIGN, details):
        await services.records.assign_project(tenant.id, session_id, request.project_id)


@router.post("/sessions/search")
async def search_sessions(
    request: SessionSearchRequest, services: ServicesDep, tenant: TenantDep
) -> SessionSearchResponse:
    """Find sessions. Continue with `next_cursor` until it is null, because a page may be short."""
    if not may_find(request.owner, tenant.id):
        return SessionSearchResponse(sessions=[])
    async with services.walks.of(tenant.id):
        found, position = await _look(request, services, tenant.id)
        stored = await services.session_search.stored(tenant.id)
    return SessionSearchResponse(
        sessions=[summary_of(entry, tenant.id, stored.get(entry.record.id, Stored())) for entry in found],
        next_cursor=cursor_at(position) if position else None,
    )


async def _look(
    wanted: SessionSearchRequest, services: Services, tenant: TenantId
) -> tuple[list[SessionEntry], Cursor | None]:
    """Return a page of sessions and the position of the next page, or None at the end."""
    position = position_of(wanted.cursor) if wanted.cursor else None
    labels = LabelQuery(tuple(wanted.tags or ()), wanted.text or "")
    labelled = await services.run_labels.matching(tenant, labels) if labels else None
    found: list[SessionEntry] = []
    for _ in range(LOOKED_AT // READ_AT_ONCE):
        entries = await services.session_search.behind(tenant, position, READ_AT_ONCE)
        for number, entry in enumerate(entries, 1):
            position = entry.cursor
            has_labels = labelled is None or not labelled.isdisjoint(entry.runs)
            if has_labels and matches(wanted, entry):
                found.append(entry)
            if len(found) == wanted.limit:
                was_last = number == len(entries) < READ_AT_ONCE
                return found, None if was_last else position
        if len(entries) < READ_AT_ONCE:
            return found, None
    return found, position
