"""Endpoints of sessions: a client's configuration, the life of a session, lists and search."""

import secrets
from typing import Any

from fastapi import Request

from cotrain.errors import UnsupportedInput
from cotrain.version import PROTOCOL, __version__
from cotrain.wire import sessions as wire
from cotrain.wire.custom_loss import CreateCustomLossRequest, check_loss, encode_loss
from cotrain.wire.rest import (
    AssignProjectRequest,
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchRequest,
    SessionSearchResponse,
)
from cotrain.wire.runs import UntypedAPIFuture
from cotrain_server.errors import Invalid
from cotrain_server.http.auth import VIEWER_SESSION, exchanges_key, is_local
from cotrain_server.http.tenant_routes import Limit, Offset, Scope, ServicesDep, TenantDep, tenant_router
from cotrain_server.requests.checkpoint_validation import check_metadata
from cotrain_server.requests.pass_ops import MAX_DATUMS
from cotrain_server.requests.samples import is_sampleable
from cotrain_server.services import Services
from cotrain_server.views.records import cursor_at, matches, may_find, position_of, summary_of, text_by_name
from cotrain_store.messages.ids import TenantId
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.run_labels import LabelQuery
from cotrain_store.tenants.session_search import Cursor, SessionEntry, Stored

router = tenant_router("sessions")

#: SDK 0.38 splits calls of forward_backward into requests of at most MAX_DATUMS datums and this
#: many bytes. It counts only arrays, before compression.
CHUNK_BYTES = 32_000_000
READS_ONLY = "This API key is a viewer's: it reads what its tenant has. The server keeps no record of this session."
#: Concurrent requests of one sampling client, as in the hosted service.
MAX_SAMPLES_AT_ONCE = 2_000
#: Number of sessions that a search reads at once.
READ_AT_ONCE = 100
#: Maximum number of sessions examined for one page. A rare match may be several pages later.
MAX_EXAMINED = 2_000


@router.post("/client/config")
async def client_config(
    body: wire.ClientConfigRequest, request: Request, services: ServicesDep, tenant: TenantDep
) -> wire.ClientConfigResponse:
    """Return the configuration of a client for this server."""
    settings, quotas = services.settings, await services.quotas.of(tenant.id)
    return wire.ClientConfigResponse(
        pjwt_auth_enabled=exchanges_key(request, settings),
        fwdbwd_max_chunk_len=MAX_DATUMS,
        # The SDK counts only arrays; the surrounding bytes take as much if arrays are small.
        fwdbwd_max_chunk_bytes_count=min(CHUNK_BYTES, settings.max_body_bytes // 2),
        proto_compress_fwdbwd=not is_local(request),
        # Otherwise 0.22 writes JSON without NaN: its encoder raises after the seq is already used.
        proto_write_fwdbwd=True,
        sample_use_retrieve_futures=True,
        custom_loss_server_side=True,
        # Requests above the quota would only be answered with 429.
        sample_max_concurrent_requests=min(quotas.samples, MAX_SAMPLES_AT_ONCE),
        # The transport of 0.22 follows redirects, which its checkpoint download must see itself.
        use_pyqwest_transport=not body.sdk_version.startswith("0.22."),
        cotrain_max_pass_bytes=settings.max_body_bytes,
        cotrain_version=__version__,
        cotrain_protocol=PROTOCOL,
    )


@router.post("/client/dynamic_config")
async def dynamic_config(body: wire.ClientConfigRequest) -> wire.ClientDynamicConfigResponse:
    """Return the configuration that may change while a client runs."""
    return wire.ClientDynamicConfigResponse(sample_cancel_enabled=True)


@router.post("/create_session")
async def create_session(
    request: wire.CreateSessionRequest, services: ServicesDep, tenant: TenantDep
) -> wire.CreateSessionResponse:
    """Open a session. A viewer's session is not stored: SDKs only need its id before they can read."""
    check_metadata(request.user_metadata, request.tags)
    if not tenant.may_change:
        session_id = VIEWER_SESSION + secrets.token_hex(16)
        return wire.CreateSessionResponse(session_id=session_id, info_message=READS_ONLY)
    await services.intake.check_capacity()
    session = await services.records.create_session(
        tenant.id,
        sdk_version=request.sdk_version,
        tags=tuple(request.tags),
        user_metadata=request.user_metadata,
        project_id=request.project_id,
        display_name=request.display_name,
        key_id=tenant.key_id,
    )
    return wire.CreateSessionResponse(session_id=session.id)


@router.post("/session_heartbeat")
async def session_heartbeat(
    request: wire.SessionHeartbeatRequest, services: ServicesDep, tenant: TenantDep
) -> wire.SessionHeartbeatResponse:
    """Extend the life of a session. A viewer's session is not stored."""
    if tenant.may_change:
        await services.records.heartbeat(tenant.id, request.session_id)
    return wire.SessionHeartbeatResponse()


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    session_id: str, request: wire.FinishSessionRequest, services: ServicesDep, tenant: TenantDep
) -> dict[str, str]:
    """End a session and its runs. A viewer's session is not stored."""
    if not tenant.may_change:
        return {"type": "finish_session"}
    for name in await services.records.finish(tenant.id, session_id, request.reason.type):
        run = await services.records.run(tenant.id, name)
        await services.intake.close_run(run)
    return {"type": "finish_session"}


@router.post("/create_custom_loss")
async def create_custom_loss(
    request: CreateCustomLossRequest, services: ServicesDep, tenant: TenantDep
) -> UntypedAPIFuture:
    """Check a custom loss and return its id, which contains all of it. Nothing is stored."""
    await services.records.open_session(tenant.id, request.session_id)
    try:
        check_loss(request)
        return UntypedAPIFuture(request_id=encode_loss(request))
    except UnsupportedInput as error:
        raise Invalid(str(error)) from error


@router.get("/get_server_capabilities")
async def get_server_capabilities(services: ServicesDep) -> wire.GetServerCapabilitiesResponse:
    """List the base models."""
    pools = await services.records.served_pools()
    return wire.GetServerCapabilitiesResponse(
        supported_models=[
            wire.SupportedModel(
                model_name=pool.base_model,
                max_context_length=pool.context_length,
                trainable=True,
                sampleable=is_sampleable(pool),
                tied_embeddings=pool.tied_embeddings,
            )
            for pool in pools
        ]
    )


@router.post("/telemetry")
async def telemetry(body: dict[str, Any]) -> wire.TelemetryResponse:
    """Accept telemetry of SDKs and discard it, because it contains users' tracebacks."""
    return wire.TelemetryResponse()


lists_router = tenant_router("lists")


@lists_router.get("/sessions")
async def list_sessions(
    services: ServicesDep, tenant: TenantDep, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> ListSessionsResponse:
    """List your sessions, newest first. Sessions of other tenants are not accessible."""
    return ListSessionsResponse(sessions=list(await services.catalog.sessions(tenant.id, offset, limit)))


@lists_router.get("/sessions/{session_id}")
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


@lists_router.put("/sessions/{session_id}/project", status_code=204)
async def assign_session_project(
    session_id: str, request: AssignProjectRequest, services: ServicesDep, tenant: TenantDep
) -> None:
    """Assign a session, with its runs and samplers, to a project.

    A project is only a name: it exists once a session is assigned to it.
    """
    details = {"session_id": session_id, "project_id": request.project_id}
    async with services.audit.act(tenant, AuditEvent.PROJECT_ASSIGN, details):
        await services.records.assign_project(tenant.id, session_id, request.project_id)


@lists_router.post("/sessions/search")
async def search_sessions(
    request: SessionSearchRequest, services: ServicesDep, tenant: TenantDep
) -> SessionSearchResponse:
    """Find sessions. Continue with `next_cursor` until it is null, because a page may be short."""
    if not may_find(request.owner, tenant.id):
        return SessionSearchResponse(sessions=[])
    async with services.scans.of(tenant.id):
        found, position = await _search(request, services, tenant.id)
        stored = await services.session_search.stored(tenant.id)
    return SessionSearchResponse(
        sessions=[summary_of(entry, tenant.id, stored.get(entry.record.id, Stored())) for entry in found],
        next_cursor=cursor_at(position) if position else None,
    )


async def _search(
    wanted: SessionSearchRequest, services: Services, tenant: TenantId
) -> tuple[list[SessionEntry], Cursor | None]:
    """Return a page of sessions and the position of the next page, or None at the end."""
    position = position_of(wanted.cursor) if wanted.cursor else None
    labels = LabelQuery(tuple(wanted.tags or ()), wanted.text or "")
    labelled = await services.run_labels.matching(tenant, labels) if labels else None
    found: list[SessionEntry] = []
    for _ in range(MAX_EXAMINED // READ_AT_ONCE):
        entries = await services.session_search.after(tenant, position, READ_AT_ONCE)
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
