"""Timeline of a session, built on request from the records of the last cycles."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from cotrain.wire.rest import TraceExportResponse
from cotrain_server.http.responses import finite_json
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, TenantRoute, api_key
from cotrain_server.services import Services
from cotrain_server.signed_tokens import LINK_LIFE_S, Link
from cotrain_server.views.perfetto_trace import trace_of
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import SessionId, TenantId, WeightsRef
from cotrain_store.monitoring.status import session_cycles
from cotrain_store.redis_keys import CYCLES_KEPT

router = APIRouter(prefix="/api/v1", tags=["lists"])
exports = APIRouter(route_class=TenantRoute, dependencies=[api_key])

#: Prefix of a trace link's path. No checkpoint path starts with it.
_TRACE_OF = "trace-of:"
_FILE = "trace.json"
_NO_CYCLES = (
    f"None of the last {CYCLES_KEPT:,} cycles had a run of this session; older ones are not kept. "
    "GET /api/v1/usage has what each run took."
)


@exports.get("/sessions/{session_id}/trace_export")
async def export_session_trace(
    session_id: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> TraceExportResponse:
    """Return a link to a session's timeline. It excludes sample requests, which no cycle contains."""
    session = await services.records.session(tenant.id, session_id)
    if not await _cycles(services, tenant.id, session.id):
        return TraceExportResponse(status="failed", error=_NO_CYCLES)
    expires_at = int(time.time()) + LINK_LIFE_S
    link = Link(tenant.id, _TRACE_OF + session.id, WeightsRef(""), _FILE, expires_at)
    base = (services.settings.public_url or str(request.base_url)).rstrip("/")
    url = f"{base}/api/v1/traces/{services.signer.sign_link(link)}"
    return TraceExportResponse(status="ready", url=url)


router.include_router(exports)


@router.get("/traces/{token}", response_class=Response, responses={200: {"content": {"application/json": {}}}})
async def download_trace(token: str, services: ServicesDep) -> Response:
    """Send a session's timeline in the format of ui.perfetto.dev to any client that has the link."""
    link = services.signer.read_link(token, time.time())
    if not link.path.startswith(_TRACE_OF):
        raise Refused(Reason.BAD_LINK)
    session = await services.records.session(link.tenant, link.path.removeprefix(_TRACE_OF))
    trace = trace_of(session.id, await _cycles(services, link.tenant, session.id))
    name = {"Content-Disposition": f'attachment; filename="{session.id}.json"'}
    return Response(finite_json(trace), media_type="application/json", headers=name)


async def _cycles(services: Services, tenant: TenantId, session: SessionId) -> list[dict[str, Any]]:
    """Return the cycles of all pools that contain a session's runs."""
    names = await services.catalog.session_runs(session)
    pools = {(await services.records.run(tenant, name)).pool for name in names}
    return [cycle for pool in sorted(pools) for cycle in await session_cycles(services.connection, pool, session)]
