"""How this server is: for load balancers, dashboards, Prometheus, and tenants about themselves."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from cotrain.wire.sessions import HealthResponse
from cotrain_server.http.auth import authenticate, check_operator, is_operator
from cotrain_server.http.dependencies import ServicesDep
from cotrain_server.views.fleet_metrics import fleet_metrics
from cotrain_server.views.process_metrics import process_metrics
from cotrain_server.views.readiness import LOOK_TIMEOUT_S, reasons_not_ready
from cotrain_server.views.server_status import own_status, whole_status
from cotrain_store.errors import StoreUnavailable

router = APIRouter(tags=["status"])


@router.get("/healthz")
@router.get("/api/v1/healthz")
async def healthz() -> HealthResponse:
    """Say that this process lives. No I/O: a pause of Redis must not restart every API."""
    return HealthResponse()


@router.get("/readyz", response_model=None, responses={503: {"description": "Not ready."}})
async def readyz(services: ServicesDep) -> Response:
    """Say whether requests sent now would be trained on, and if not, why."""
    reasons = await reasons_not_ready(services)
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.get("/status")
async def status(request: Request, services: ServicesDep) -> dict[str, Any]:
    """Show the operator everything, and a tenant (by its API key) its own part."""
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            if is_operator(request, services):
                return await whole_status(services)
            return await own_status(services, (await authenticate(request, services)).id)
    except TimeoutError:
        raise StoreUnavailable from None


@router.get("/metrics")
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Show Prometheus what this process does."""
    check_operator(request, services)
    return Response(process_metrics(services), media_type=CONTENT_TYPE_LATEST)


@router.get("/metrics/fleet")
async def metrics_of_fleet(request: Request, services: ServicesDep) -> Response:
    """Show Prometheus the store and all pools. Every API process has the same numbers: scrape one of them."""
    check_operator(request, services)
    return Response(await fleet_metrics(services), media_type=CONTENT_TYPE_LATEST)
