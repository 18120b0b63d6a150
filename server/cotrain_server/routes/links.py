"""Endpoints external_weights_urls, archive and files: links to a checkpoint's files, and their download.

A tenant that may read a checkpoint can create links to it. A download needs no API key: its link is valid for one file,
for a few minutes.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from email.utils import format_datetime

from fastapi import APIRouter, Request, Response

from cotrain.wire.checkpoints import ExternalWeightsUrlsResponse
from cotrain_server.http.downloads import (
    ARCHIVE,
    SlotDownload,
    TarDownload,
    file_download,
    files_of,
    names_of,
    open_files,
)
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, tenant_router
from cotrain_server.requests.checkpoint_validation import CHECKPOINT, Source, find_source, path_of
from cotrain_server.services import Services
from cotrain_server.signed_tokens import LINK_LIFE_S, Link
from cotrain_store.errors import CheckpointNotFound, Reason, Refused
from cotrain_store.messages.runs import Tenant
from cotrain_store.tenants.audit_log import AuditEvent

router = tenant_router("checkpoints")


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> ExternalWeightsUrlsResponse:
    """Return a link to each file of a checkpoint of any kind."""
    source = await find_source(services, tenant.id, path_of(run_id, kind, name))
    names = names_of(source.checkpoint, source.weights)
    urls, expires = await _links(request, services, tenant, source, names)
    return ExternalWeightsUrlsResponse(urls=urls, expires=expires)


@router.get(
    f"{CHECKPOINT}/archive",
    status_code=302,
    response_class=Response,
    responses={302: {"description": "Where the archive is, in `Location`; until when, in `Expires`."}},
)
async def archive(
    run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> Response:
    """Redirect to a tar of all files of a checkpoint, as SDKs before 0.38 request it."""
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


files_router = APIRouter(prefix="/api/v1", tags=["checkpoints"])


@files_router.get(
    "/files/{token}/{file}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}, "application/x-tar": {}}}},
)
async def download(token: str, file: str, request: Request, services: ServicesDep) -> Response:
    """Send one file of a checkpoint to any client that has the link. No API key is required.

    The checkpoint of the link is looked up again. The link fails if it was deleted or its reader
    lost access, and a reassigned name never yields other weights. Above DOWNLOADS_PER_TENANT
    concurrent downloads, a tenant's downloads queue.
    """
    link = services.signer.read_link(token, time.time())
    if link.file != file:
        raise Refused(Reason.BAD_LINK)
    async with AsyncExitStack() as slot:
        await slot.enter_async_context(services.downloads.of(link.tenant))
        source = await find_source(services, link.tenant, link.path)
        if source.weights.ref != link.weights:
            raise CheckpointNotFound
        answer = await _answer(services, source, file, link.path, request)
        return SlotDownload(answer, slot.pop_all())


async def _answer(services: Services, source: Source, file: str, path: str, request: Request) -> Response:
    checkpoint = source.checkpoint
    files_there = files_of(services.settings.blob_store, checkpoint, source.weights)
    if file != ARCHIVE:
        return file_download((await open_files(files_there, [file], path))[0], request.headers.get("range"))
    files = await open_files(files_there, names_of(checkpoint, source.weights), path)
    name = f"{checkpoint.run}_{checkpoint.kind}_{checkpoint.name}.tar".replace(":", "_")
    return TarDownload(files, name, checkpoint.created_at)
