"""Timeline of a session for https://ui.perfetto.dev, built on request from the records of the last cycles.

The format is the Trace Event Format of Chrome (complete events, `ph: X`; times in µs). In each
cycle a tenant sees its own ops, and the times, which are common to all tenants of the cycle.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from cotrain.wire.rest import TraceExportResponse
from cotrain_server.http.responses import finite_json
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, server_url, tenant_router
from cotrain_server.services import Services
from cotrain_server.signed_tokens import LINK_LIFE_S, Link
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import SessionId, TenantId, WeightsRef
from cotrain_store.monitoring.recent_activity import session_cycles
from cotrain_store.redis_keys import CYCLES_KEPT

_PASSES = ("forward", "forward_backward", "reverse_kl")
_PROCESS = 1

router = tenant_router("lists")

#: Prefix of a trace link's path. No checkpoint path starts with it.
_TRACE_OF = "trace-of:"
_FILE = "trace.json"
_NO_CYCLES = (
    f"None of the last {CYCLES_KEPT:,} cycles had a run of this session; older ones are not kept. "
    "GET /api/v1/usage has what each run took."
)


@router.get("/sessions/{session_id}/trace_export")
async def export_session_trace(
    session_id: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> TraceExportResponse:
    """Return a link to a session's timeline. It excludes sample requests, which no cycle contains."""
    session = await services.records.session(tenant.id, session_id)
    if not await _cycles(services, tenant.id, session.id):
        return TraceExportResponse(status="failed", error=_NO_CYCLES)
    expires_at = int(time.time()) + LINK_LIFE_S
    link = Link(tenant.id, _TRACE_OF + session.id, WeightsRef(""), _FILE, expires_at)
    url = f"{server_url(request, services.settings)}/api/v1/traces/{services.signer.sign_link(link)}"
    return TraceExportResponse(status="ready", url=url)


download_router = APIRouter(prefix="/api/v1", tags=["lists"])


@download_router.get("/traces/{token}", response_class=Response, responses={200: {"content": {"application/json": {}}}})
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


def trace_of(session: str, cycles: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one track per run: waiting, the cycle, and within it the passes and the optimizer step."""
    runs = sorted({run["run"] for cycle in cycles for run in cycle["runs"]}, key=lambda run: (len(run), run))
    track_by_run = {run: track for track, run in enumerate(runs, 1)}
    events = [
        _title("process_name", 0, f"session {session}"),
        *(_title("thread_name", track, run) for run, track in track_by_run.items()),
    ]
    for cycle in cycles:
        for run in cycle["runs"]:
            events += _events(cycle, run, track_by_run[run["run"]])
    # The order matters: Perfetto detects the format by the start of the file.
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(cycle: Mapping[str, Any], run: Mapping[str, Any], track: int) -> Iterator[dict[str, Any]]:
    start_us = cycle["started_at"] * 1e6
    planned_us = min(cycle["planned_at"] * 1e6, start_us)
    yield _slice("planned", track, planned_us, start_us - planned_us)
    facts = {name: run[name] for name in ("ops", "tokens", "failed")}
    yield _slice(
        f"cycle {cycle['cycle']}", track, start_us, cycle["duration_ms"] * 1e3, facts | {"outcome": cycle["outcome"]}
    )
    if cycle["wave_ms"] is None:  # executed op by op, without waves
        return
    passes_us = (cycle["wave_ms"] + cycle["sampling_ms"]) * 1e3
    if _has(run, _PASSES):
        sampling = {"of it sampling, ms": cycle["sampling_ms"]}
        yield _slice("passes of all runs", track, start_us, passes_us, sampling)
    if _has(run, ("optim_step",)):
        yield _slice("optimizer of all runs", track, start_us + passes_us, cycle["optim_ms"] * 1e3)


def _has(run: Mapping[str, Any], kinds: Iterable[str]) -> bool:
    return any(kind in run["ops"] for kind in kinds)


def _slice(
    name: str, track: int, start_us: float, length_us: float, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    span = {"pid": _PROCESS, "tid": track, "ts": round(start_us), "dur": max(0, round(length_us))}
    return {"name": name, "ph": "X", **span, "args": dict(facts or {})}


def _title(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}
