"""Endpoints of checkpoints: lists, changes, copies, and links to download their files.

The endpoints find every checkpoint that the tenant may read. The store ensures that only its owner can change it. A
download needs no API key: its link is valid for one file, for a few minutes.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from typing import Annotated, get_args

from fastapi import APIRouter, Header, HTTPException, Request, Response

from cotrain.wire import rest as wire
from cotrain.wire.checkpoints import (
    CheckpointTtlRequest,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
)
from cotrain_server.errors import Invalid
from cotrain_server.http.downloads import (
    ARCHIVE,
    Download,
    file_download,
    file_names,
    folder_of,
    open_files,
    tar_download,
)
from cotrain_server.http.tenant_routes import Limit, Offset, ServicesDep, TenantDep, server_url, tenant_router
from cotrain_server.requests.checkpoint_validation import (
    CHECKPOINT,
    Source,
    check_ttl,
    find_source,
    path_of,
    quota_reached,
    reader_of,
)
from cotrain_server.services import Services
from cotrain_server.signed_tokens import LINK_LIFE_S, Link
from cotrain_server.views.records import checkpoint_of, has_checkpoint, may_find, time_at, us_of
from cotrain_store.errors import CheckpointNotFound, MalformedPath, Reason, Refused, RunNotFound
from cotrain_store.messages.ids import RunId, SessionId, TenantId, run_id
from cotrain_store.messages.runs import CheckpointKind, RunRecord, RunState, Tenant
from cotrain_store.tenants.audit_log import AuditEvent

lists_router = tenant_router("lists")

_SDK = re.compile(r"AsyncTinker/Python (\d+)\.(\d+)\b.*")
#: First SDK version that can read checkpoints of type `external`.
_FIRST_WITH_EXTERNAL = (0, 30)
#: Metadata key of a copy's run. Its value is the source path.
COPIED_FROM = "copied_from"


@lists_router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(
    run_id: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> wire.CheckpointsListResponse:
    """List a run's checkpoints; for another tenant's run, only the published ones."""
    records = await services.catalog.checkpoints_of(tenant.id, run_id)
    hides_external = _hides_external(request.headers)
    runs = await services.catalog.runs_of(records)
    return wire.CheckpointsListResponse(
        checkpoints=[
            checkpoint_of(record, runs.get(record.run))
            for record in records
            if not (hides_external and record.kind == "external_weights")
        ]
    )


@lists_router.get("/checkpoints")
async def list_user_checkpoints(
    request: Request, services: ServicesDep, tenant: TenantDep, limit: Limit = 100, offset: Offset = 0
) -> wire.CheckpointsListResponse:
    """List the checkpoints of all your runs."""
    keep = _is_not_external if _hides_external(request.headers) else None
    page = await services.catalog.checkpoints(tenant.id, offset, limit, keep)
    runs = await services.catalog.runs_of(page.items)
    return wire.CheckpointsListResponse(
        checkpoints=[checkpoint_of(record, runs.get(record.run)) for record in page.items],
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=page.total_count),
    )


@lists_router.post("/checkpoints/search")
async def search_checkpoints(
    wanted: wire.CheckpointSearchRequest, services: ServicesDep, tenant: TenantDep
) -> wire.CheckpointSearchResponse:
    """Find your checkpoints by exact metadata, type, base model and project, newest first."""
    if not may_find(wanted.owner, tenant.id):
        return wire.CheckpointSearchResponse(checkpoints=[])
    cursor = wanted.cursor
    after = (us_of(cursor.last_created_at), cursor.last_checkpoint_uuid) if cursor else None
    async with services.scans.of(tenant.id):
        found, position = await services.catalog.search_checkpoints(
            tenant.id, after, wanted.limit, partial(has_checkpoint, wanted)
        )
    next_cursor = None
    if position:
        next_cursor = wire.CheckpointSearchCursor(
            last_created_at=time_at(position[0]), last_checkpoint_uuid=position[1]
        )
    return wire.CheckpointSearchResponse(
        checkpoints=[checkpoint_of(record, run) for record, run in found], next_cursor=next_cursor
    )


def _hides_external(headers: Mapping[str, str]) -> bool:
    """Return True if a client is an SDK that cannot read `external` in a list."""
    sdk = _SDK.fullmatch(headers.get("user-agent", ""))
    return sdk is not None and (int(sdk[1]), int(sdk[2])) < _FIRST_WITH_EXTERNAL


def _is_not_external(member: str) -> bool:
    return member.split("/")[1] != "external_weights"


router = tenant_router("checkpoints")


@router.delete(CHECKPOINT, status_code=204)
async def delete_checkpoint(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> None:
    """Delete a checkpoint's name. Runs and samplers that loaded it, or are loading it, are unaffected."""
    checkpoint = await services.records.checkpoint(tenant.id, path_of(run_id, kind, name))
    details = {"tinker_path": checkpoint.path}
    async with services.audit.act(tenant, AuditEvent.CHECKPOINT_DELETE, details):
        await services.checkpoints.delete(tenant.id, checkpoint.run, checkpoint.kind, checkpoint.name)


@router.post(f"{CHECKPOINT}/publish", status_code=204)
async def publish_checkpoint(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> None:
    """Publish a checkpoint: every tenant of this server may load, sample and download it."""
    await _publish(services, tenant, path_of(run_id, kind, name), public=True)


@router.delete(f"{CHECKPOINT}/publish", status_code=204)
async def unpublish_checkpoint(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> None:
    """Unpublish a checkpoint. Copies that other tenants made stay theirs."""
    await _publish(services, tenant, path_of(run_id, kind, name), public=False)


@router.put(f"{CHECKPOINT}/ttl", status_code=204)
async def set_ttl(
    run_id: str, kind: str, name: str, wanted: CheckpointTtlRequest, services: ServicesDep, tenant: TenantDep
) -> None:
    """Set the remaining lifetime of a checkpoint in seconds; null removes the limit."""
    check_ttl(wanted.ttl_seconds)
    found = await services.records.checkpoint(tenant.id, path_of(run_id, kind, name))
    details = {"tinker_path": found.path}
    async with services.audit.act(tenant, AuditEvent.CHECKPOINT_SET_TTL, details):
        await services.checkpoints.set_ttl(tenant.id, found.run, found.kind, found.name, wanted.ttl_seconds)


async def _publish(services: Services, tenant: Tenant, path: str, *, public: bool) -> None:
    found = await services.records.checkpoint(tenant.id, path)
    event = AuditEvent.CHECKPOINT_PUBLISH if public else AuditEvent.CHECKPOINT_UNPUBLISH
    async with services.audit.act(tenant, event, {"tinker_path": found.path}):
        await services.checkpoints.publish(tenant.id, found.run, found.kind, found.name, public=public)


@router.api_route(
    "/training_runs/{run_id}/checkpoints/{name}", methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False
)
@router.api_route(CHECKPOINT, methods=["GET", "POST", "PUT"], include_in_schema=False)
async def refuse_bare_name(run_id: str, name: str, kind: str = "") -> None:
    """Explain the form of a checkpoint id to a client that sends `0001` instead of `weights/0001`.

    If the kind is valid, the method is wrong instead.
    """
    if kind in get_args(CheckpointKind):
        raise HTTPException(405)
    raise MalformedPath(
        f"Checkpoint id {(kind or name)!r:.100} is malformed. Use weights/<name> or sampler_weights/<name>."
    )


@router.post("/copy_weights")
async def copy_weights(
    wanted: CopyWeightsRequest,
    request: Request,
    services: ServicesDep,
    tenant: TenantDep,
    x_idempotency_key: Annotated[str | None, Header()] = None,
    x_tinker_weights_access_token: Annotated[str | None, Header()] = None,
) -> CopyWeightsResponse:
    """Copy a checkpoint to a new run that cannot be trained. Both share the stored bytes.

    Idempotent: the run is named by its number in a session, or by the idempotency key, which an SDK
    reuses for all attempts of one call.
    """
    check_ttl(wanted.ttl_seconds)
    session = await _destination(services, tenant.id, wanted, x_idempotency_key)
    name = run_id(session, wanted.model_seq_id or 0)
    if await _is_copied(services, tenant.id, name, wanted.source_path):
        return CopyWeightsResponse(tinker_path=_moved(wanted.source_path, name))
    if full := await quota_reached(services, tenant.id):
        raise Invalid(full)
    await services.records.check_record_quota(tenant.id)
    await services.intake.check_capacity()
    token = x_tinker_weights_access_token or wanted.weights_access_token
    reader = await reader_of(request, services, tenant.id, token)
    source = await find_source(services, reader, wanted.source_path)
    if wanted.session_id is None:
        project = wanted.destination_project_id
        await services.records.create_session(tenant.id, session_id=session, project_id=project, key_id=tenant.key_id)
    run = _closed_run(name, tenant.id, session, source)
    details = {"tinker_path": _moved(wanted.source_path, name)}
    async with services.audit.act(tenant, AuditEvent.CHECKPOINT_COPY, details):
        copy = await services.checkpoints.copy(source.checkpoint, run, wanted.ttl_seconds, reader=reader)
    return CopyWeightsResponse(tinker_path=copy.path)


async def _destination(services: Services, tenant: TenantId, wanted: CopyWeightsRequest, key: str | None) -> SessionId:
    """Return the destination session of a copy, or a name for a new session in the project."""
    if (wanted.session_id is None) != (wanted.model_seq_id is None):
        raise Invalid("session_id and model_seq_id are needed together.")
    if wanted.session_id is not None:
        return (await services.records.open_session(tenant, wanted.session_id)).id
    if wanted.destination_project_id is None:
        raise Invalid("destination_project_id, or session_id with model_seq_id, is needed.")
    made_of = f"{tenant}\0{key or secrets.token_hex(16)}"
    return SessionId("copy-" + hashlib.sha256(made_of.encode()).hexdigest()[:32])


async def _is_copied(services: Services, tenant: TenantId, run: RunId, source_path: str) -> bool:
    """Return True if this copy already exists, even if its source has changed or been deleted since."""
    try:
        known = await services.records.run(tenant, run)
    except RunNotFound:
        return False
    return known.user_metadata.get(COPIED_FROM) == source_path


def _moved(path: str, run: RunId) -> str:
    return path_of(run, *path.split("/")[-2:])


def _closed_run(name: RunId, tenant: TenantId, session: SessionId, source: Source) -> RunRecord:
    weights = source.weights
    return RunRecord(
        id=name,
        tenant=tenant,
        session=session,
        pool=weights.pool,
        base_model=weights.base_model,
        lora=weights.lora,
        created_at=time.time(),
        user_metadata={COPIED_FROM: source.checkpoint.path},
        state=RunState.CLOSED,
    )


@router.get(f"{CHECKPOINT}/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> ExternalWeightsUrlsResponse:
    """Return a link to each file of a checkpoint of any kind."""
    source = await find_source(services, tenant.id, path_of(run_id, kind, name))
    names = file_names(source.checkpoint, source.weights)
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
    base, urls = server_url(request, services.settings), {}
    details = {"tinker_path": checkpoint.path}
    async with services.audit.act(tenant, AuditEvent.CHECKPOINT_READ, details):
        for file in names:
            link = Link(tenant.id, checkpoint.path, checkpoint.weights, file, expires_at)
            urls[file] = f"{base}/api/v1/files/{services.signer.sign_link(link)}/{file}"
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
        answer.slot = slot.pop_all()
        return answer


async def _answer(services: Services, source: Source, file: str, path: str, request: Request) -> Download:
    checkpoint = source.checkpoint
    folder = folder_of(services.settings.blob_store, checkpoint, source.weights)
    if file != ARCHIVE:
        (only,) = await open_files(folder, [file], path)
        return file_download(only, request.headers)
    files = await open_files(folder, file_names(checkpoint, source.weights), path)
    name = f"{checkpoint.run}_{checkpoint.kind}_{checkpoint.name}.tar".replace(":", "_")
    return tar_download(files, name, checkpoint.created_at)
