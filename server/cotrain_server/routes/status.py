"""Status endpoints for load balancers, dashboards, Prometheus and tenants, and tokenizer downloads.

`/tokenizers` serves the tokenizer of a base model to clients that cannot load it from a hub.
"""

import asyncio
import gzip
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from cotrain.wire.runs import TOKENIZER_FILES, TokenizerResponse
from cotrain.wire.sessions import HealthResponse
from cotrain_server.http.auth import authenticate, check_operator, is_operator
from cotrain_server.http.tenant_routes import ServicesDep, tenant_router
from cotrain_server.text_apis.tokenizer_cache import tokenizer_folder
from cotrain_server.views.fleet_metrics import fleet_metrics, process_metrics
from cotrain_server.views.server_status import FLEET_TIMEOUT_S, own_status, readiness, whole_status
from cotrain_store.errors import StoreUnavailable

router = APIRouter(tags=["status"])


@router.get("/healthz")
@router.get("/api/v1/healthz")
async def healthz() -> HealthResponse:
    """Report that this process runs. Performs no I/O, so that an unavailable Redis does not restart every API process."""
    return HealthResponse()


@router.get("/readyz", response_model=None, responses={503: {"description": "Not ready."}})
async def readyz(services: ServicesDep) -> Response:
    """Report if the server can run new requests, with reasons if it cannot, and the workers that restore runs."""
    found = await readiness(services)
    body = {"ready": not found.reasons, "reasons": found.reasons}
    if found.restoring:
        body["restoring"] = found.restoring
    return JSONResponse(body, 503 if found.reasons else 200)


@router.get("/status")
async def status(request: Request, services: ServicesDep) -> dict[str, Any]:
    """Show the whole status to the operator, and its own part to a tenant (by its API key)."""
    try:
        async with asyncio.timeout(FLEET_TIMEOUT_S):
            if is_operator(request, services):
                return await whole_status(services)
            return await own_status(services, (await authenticate(request, services)).id)
    except TimeoutError:
        raise StoreUnavailable from None


@router.get("/metrics")
async def metrics(request: Request, services: ServicesDep) -> Response:
    """Return the metrics of this process for Prometheus."""
    check_operator(request, services)
    return Response(process_metrics(services), media_type=CONTENT_TYPE_LATEST)


@router.get("/metrics/fleet")
async def metrics_of_fleet(request: Request, services: ServicesDep) -> Response:
    """Return the metrics of the store and all pools. Every API process returns the same numbers, so scrape only one."""
    check_operator(request, services)
    return Response(await fleet_metrics(services), media_type=CONTENT_TYPE_LATEST)


tokenizers_router = tenant_router("sampling")


@tokenizers_router.get("/tokenizers", responses={200: {"model": TokenizerResponse}})
async def get_tokenizer(
    request: Request, services: ServicesDep, base_model: Annotated[str, Query(max_length=4_096)]
) -> Response:
    """Send the files of a base model's tokenizer, as its workers use it."""
    pool = await services.records.pool_of(base_model)
    folder = await tokenizer_folder(pool, services.settings)
    content = await asyncio.to_thread(_compressed, folder)
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    else:
        content = await asyncio.to_thread(gzip.decompress, content)
    return Response(content, headers=headers, media_type="application/json")


@lru_cache(maxsize=8)  # a folder is named after its content; one with a large vocabulary takes 8 MB
def _compressed(folder: Path) -> bytes:
    paths = [folder / name for name in TOKENIZER_FILES]
    files = {path.name: path.read_text(encoding="utf-8") for path in paths if path.exists()}
    return gzip.compress(TokenizerResponse(files=files).model_dump_json().encode(), mtime=0)
