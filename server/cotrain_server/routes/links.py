"""external_weights_urls and archive: links to a checkpoint's files, for a tenant that may read it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cotrain.wire.checkpoints import ExternalWeightsUrlsResponse
from cotrain_server.http.dependencies import ServicesDep, TenantDep, api_key
from cotrain_server.http.downloads import ARCHIVE, names_of
from cotrain_server.http.tenant_routes import TenantRoute
from cotrain_server.requests.checkpoint_lookup import CHECKPOINT, find_source, path_of
from cotrain_server.signed_tokens import LINK_LIFE_S, Link
from cotrain_store.tenants.audit_log import AuditEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_server.requests.checkpoint_lookup import Source
    from cotrain_server.services import Services
    from cotrain_store.messages.sessions import Tenant

router = APIRouter(
    prefix="/api/v1", tags=["checkpoints"], route_class=TenantRoute, dependencies=[api_key]
)


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> ExternalWeightsUrlsResponse:
    """Give a link to each file of a checkpoint, of whatever kind."""
    source = await find_source(services, tenant.id, path_of(run_id, kind, name))
    names = names_of(source.checkpoint, source.weights)
    urls, expires = await _links(request, services, tenant, source, names)
    return ExternalWeightsUrlsResponse(urls=urls, expires=expires)


@router.get(
    f"{CHECKPOINT}/archive",
    status_code=302,
    response_class=Response,
    responses={
        302: {"description": "Where the archive is, in `Location`; until when, in `Expires`."}
    },
)
async def archive(
    run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> Response:
    """Give a link to all files of a checkpoint in one tar, as SDKs before 0.38 ask for it."""
    source = await find_source(services, tenant.id, path_of(run_id, kind, name))
    urls, expires = await _links(request, services, tenant, source, [ARCHIVE])
    headers = {"Location": urls[ARCHIVE], "Expires": format_datetime(expires, usegmt=True)}
    return Response(status_code=302, headers=headers)


async def _links(
    request: Request, services: Services, tenant: Tenant, source: Source, names: Sequence[str]
) -> tuple[dict[str, str], datetime]:
    expires_at = int(time.time()) + LINK_LIFE_S
    checkpoint = source.checkpoint
    base = services.settings.public_url or str(request.base_url)
    urls = {}
    details = {"tinker_path": checkpoint.path}
    async with services.audit.act(tenant, AuditEvent.CHECKPOINT_READ, details):
        for file in names:
            link = Link(tenant.id, checkpoint.path, checkpoint.weights, file, expires_at)
            urls[file] = f"{base.rstrip('/')}/api/v1/files/{services.signer.sign_link(link)}/{file}"
    return urls, datetime.fromtimestamp(expires_at, UTC)
