"""Download checkpoints: links that anybody may follow for some minutes, and what they lead to."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cotrain.checkpoint_types import ExternalWeightsUrlsResponse
from cotrain_server.deps import ServicesDep, TenantDep, api_key
from cotrain_server.downloads import (
    ARCHIVE,
    FileDownload,
    TarDownload,
    folder_of,
    names_of,
    open_files,
)
from cotrain_server.errors import BadLink
from cotrain_server.gate import TenantRoute
from cotrain_server.routes.checkpoints import CHECKPOINT, path_of
from cotrain_server.signing import LINK_LIFE_S, Link
from cotrain_server.sources import find_source
from cotrain_store.audit import AuditEvent
from cotrain_store.errors import CheckpointNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_server.services import Services
    from cotrain_server.sources import Source
    from cotrain_store.messages import Tenant

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])
links = APIRouter(route_class=TenantRoute, dependencies=[api_key])


@links.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> ExternalWeightsUrlsResponse:
    """Give a link to each file of a checkpoint, of whatever kind."""
    source = await find_source(services, tenant.id, path_of(run_id, kind, name))
    names = names_of(source.checkpoint, source.weights)
    urls, expires = await _links(request, services, tenant, source, names)
    return ExternalWeightsUrlsResponse(urls=urls, expires=expires)


@links.get(
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
    for file in names:
        link = Link(tenant.id, checkpoint.path, checkpoint.weights, file, expires_at)
        urls[file] = f"{base.rstrip('/')}/api/v1/files/{services.signer.sign_link(link)}/{file}"
    details = {"tinker_path": checkpoint.path}
    await services.audit.note(tenant.id, AuditEvent.CHECKPOINT_READ, details)
    return urls, datetime.fromtimestamp(expires_at, UTC)


router.include_router(links)


@router.get(
    "/files/{token}/{file}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}, "application/x-tar": {}}}},
)
async def download(token: str, file: str, services: ServicesDep) -> Response:
    """Send one file of a checkpoint, to whoever has the link; no API key is asked for.

    What the link was made for is looked up again: a checkpoint that was deleted, or taken from its
    reader, is gone, and a name that moved does not give other weights.
    """
    link = services.signer.read_link(token, time.time())
    if link.file != file:
        raise BadLink
    source = await find_source(services, link.tenant, link.path)
    if source.weights.ref != link.weights:
        raise CheckpointNotFound
    return await _answer(services, source, file)


async def _answer(services: Services, source: Source, file: str) -> Response:
    checkpoint = source.checkpoint
    folder = folder_of(services.settings.data_dir, checkpoint, source.weights)
    if file != ARCHIVE:
        return FileDownload((await open_files(folder, [file]))[0])
    files = await open_files(folder, names_of(checkpoint, source.weights))
    name = f"{checkpoint.run}_{checkpoint.kind}_{checkpoint.name}.tar".replace(":", "_")
    return TarDownload(files, name, checkpoint.created_at)
