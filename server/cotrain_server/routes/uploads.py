"""Endpoints training_runs/upload, checkpoints/upload and external_weights_upload_*: import an adapter
that was trained elsewhere.

The first two receive an archive. The others receive each file by a link of its own, and import them
at the finish. Each upload creates a run. Its first op imports the adapter, and its second saves it under the given
name. The result is an ordinary checkpoint that can be loaded, sampled and trained.
"""

import asyncio
import hashlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Annotated, Any

import structlog
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from typing_extensions import override

from cotrain.wire import checkpoints as wire
from cotrain_server.adapter_upload.archive import unpack
from cotrain_server.adapter_upload.peft_config import CONFIG, read_object
from cotrain_server.adapter_upload.peft_tensors import read_adapter
from cotrain_server.adapter_upload.pending_files import PendingFiles, limits_of
from cotrain_server.errors import Invalid
from cotrain_server.http.auth import authenticate
from cotrain_server.http.tenant_routes import Handler, ServicesDep, TenantDep, server_url, tenant_router
from cotrain_server.http.upload_body import file_in_form, received
from cotrain_server.requests.checkpoint_validation import check_metadata, check_name, check_ttl, quota_reached
from cotrain_server.requests.pass_validation import check_rank
from cotrain_server.requests.submission import new_run
from cotrain_server.services import Services
from cotrain_server.signed_tokens import UPLOAD_LIFE_S, Link, StartedUpload
from cotrain_store.bodies.adapter_bodies import PeftAdapter, SaveRequest, encode_import
from cotrain_store.errors import (
    CheckpointNotFound,
    Reason,
    Refused,
    RunClosed,
    RunNotFound,
    SeqConflict,
    StoreUnavailable,
)
from cotrain_store.messages.ids import SessionId, TenantId, WeightsRef, encode, request_id, run_id
from cotrain_store.messages.ops import OpKind, ResultKind
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord, SessionRecord, Tenant
from cotrain_store.results.pending import Pending
from cotrain_store.tenants.audit_log import AuditEvent

log = structlog.get_logger()

#: Seed of the parameters that an upload omits, equal for every run.
SEED = 0
FOLDER = "uploads"
_BYTES = {"type": "string", "format": "binary"}
_PART = {"type": "object", "required": ["file"], "properties": {"file": _BYTES}}
_TAR = "A tar (plain or gzip) with adapter_config.json and adapter_model.safetensors."
#: OpenAPI schemas of the bodies.
_FILE = {"required": True, "content": {"application/octet-stream": {"schema": _BYTES}}}
FILE: dict[str, Any] = {"requestBody": _FILE}
ARCHIVE: dict[str, Any] = {"requestBody": {**_FILE, "description": _TAR}}
FORM: dict[str, Any] = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _PART}}}}
#: Prefix of the path of a link to an upload's file. No checkpoint path starts with it.
_UPLOAD_OF = "upload-of:"
#: Name of a checkpoint whose client cannot choose one. Each has its own run.
NAME = "uploaded"
#: The client waits 300 s for an answer, and loads the path as soon as it receives one.
PATIENCE_S = 240.0
#: SDKs wait a minute for an answer, and then send the finish again.
FINISH_PATIENCE_S = 45.0


@dataclass(frozen=True)
class _Wanted:
    """Result that an upload requests: a checkpoint of a new run."""

    owner: Tenant
    pool: PoolRecord
    session: SessionRecord | None  # None: create one once the archive is read
    model_seq_id: int
    save: SaveRequest

    def path_in(self, run: RunRecord) -> str:
        """Return the path of the resulting checkpoint."""
        return f"tinker://{run.id}/{self.save.kind}/{self.save.name}"

    @property
    def body(self) -> bytes:
        """Body of the op that saves."""
        return encode(self.save).encode()


class UploadRoute(APIRoute):
    """A route that authenticates its tenant, then reads its body in chunks without the framework."""

    @override
    def get_route_handler(self) -> Handler:
        """Return a handler that authenticates before the route runs."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            await authenticate(request, request.app.state.services)
            return await handle(request)

        return guarded


router = tenant_router("uploads", kind=UploadRoute)


@router.post("/training_runs/upload", response_model_exclude_none=True, openapi_extra=ARCHIVE)
async def upload_checkpoint(
    request: Request, query: Annotated[wire.UploadQuery, Query()], services: ServicesDep, tenant: TenantDep
) -> wire.UploadResponse:
    """Queue the import of an archive's adapter as a checkpoint of a new run.

    Invalid files are refused at once. The future reports whether they fit the base model.
    """
    wanted = await _read_query(services, tenant, query)
    if full := await quota_reached(services, tenant.id):
        raise Invalid(full)
    limit = services.settings.max_upload_bytes
    async with _receiving(request, services, tenant.id, limit) as archive:
        adapter = await asyncio.to_thread(_read_archive, archive, limit)
        run = await _queue(services, wanted, adapter)
    return wire.UploadResponse(
        request_id=request_id(run.id, 1),
        model_id=run.id,
        import_request_id=request_id(run.id, 0),
        path=wanted.path_in(run),
    )


@router.post("/checkpoints/upload", openapi_extra=FORM)
async def upload_form(request: Request, services: ServicesDep, tenant: TenantDep) -> wire.UploadedResponse:
    """Import the archive in a form's part `file`, and answer once it can be loaded.

    The base model is the one named in adapter_config.json if it is served, otherwise the only one served.
    """
    if full := await quota_reached(services, tenant.id):
        raise Invalid(full)
    limit = services.settings.max_upload_bytes
    async with _receiving(request, services, tenant.id, limit) as body:
        form = request.headers.get("content-type", "")
        archive = await asyncio.to_thread(file_in_form, body, form, "file")
        files = await asyncio.to_thread(unpack, archive, limit)
        adapter = await asyncio.to_thread(read_adapter, files.config, files.tensors, SEED)
        pool = await _pool_of(services, files.config)
        save = _save_request(wire.UploadQuery(base_model=pool.base_model, name=NAME))
        wanted = _Wanted(tenant, pool, None, 0, save)
        run = await _queue(services, wanted, adapter)
    for seq in (0, 1):
        await _await_op(services, run, seq, PATIENCE_S)
    return wire.UploadedResponse(path=wanted.path_in(run))


external_router = tenant_router("uploads")


@external_router.post("/external_weights_upload_start")
async def start_external_upload(
    wanted: wire.ExternalWeightsUploadStartRequest, request: Request, services: ServicesDep, tenant: TenantDep
) -> wire.ExternalWeightsUploadStartResponse:
    """Return a link for each file of an adapter. Nothing is stored before the first file arrives."""
    pool, settings = await services.records.pool_of(wanted.base_model), services.settings
    lora, expires_at = wanted.lora_config, int(time.time()) + UPLOAD_LIFE_S
    check_rank(lora.rank, min(pool.max_rank, settings.max_rank))
    if full := await quota_reached(services, tenant.id):
        raise Invalid(full)
    upload = StartedUpload(
        tenant.id, secrets.token_hex(16), pool.base_model, lora.rank, lora.train_attn,
        lora.train_mlp, lora.train_unembed, wanted.destination_project_id, expires_at,
    )  # fmt: skip
    base, urls = server_url(request, settings), {}
    for file in limits_of(settings.max_upload_bytes):
        path = _UPLOAD_OF + _pending(services, upload).name
        link = Link(tenant.id, path, WeightsRef(""), file, expires_at)
        urls[file] = f"{base}/api/v1/uploads/{services.signer.sign_link(link)}/{file}"
    return wire.ExternalWeightsUploadStartResponse(
        upload_id=services.signer.sign_upload(upload), urls=urls, expires=datetime.fromtimestamp(expires_at, UTC)
    )


@external_router.post("/external_weights_upload_finish")
async def finish_external_upload(
    wanted: wire.ExternalWeightsUploadFinishRequest, services: ServicesDep, tenant: TenantDep
) -> wire.ExternalWeightsUploadFinishResponse:
    """Import the files of an upload, and answer once the checkpoint can be loaded. Idempotent."""
    upload = services.signer.read_upload(wanted.upload_id, tenant.id)
    run = run_id(SessionId(upload.session), 0)
    path = f"tinker://{run}/external_weights/{NAME}"
    answer = wire.ExternalWeightsUploadFinishResponse(tinker_path=path)
    try:
        await services.records.checkpoint(tenant.id, path)
    except CheckpointNotFound:
        queued = await _import_files(services, tenant, upload)
        for seq in (0, 1):
            await _await_op(services, queued, seq, FINISH_PATIENCE_S)
    return answer


files_router = APIRouter(prefix="/api/v1", tags=["uploads"])


@files_router.put("/uploads/{token}/{file}", response_class=Response, openapi_extra=FILE)
async def upload_file(token: str, file: str, request: Request, services: ServicesDep) -> Response:
    """Store one file of an upload, from any client that has the link. No API key is required."""
    link, settings = services.signer.read_link(token, time.time()), services.settings
    if link.file != file or not link.path.startswith(_UPLOAD_OF):
        raise Refused(Reason.BAD_LINK)
    blobs, limit = settings.blob_store, limits_of(settings.max_upload_bytes)[file]
    pending = PendingFiles(blobs, link.tenant, link.path.removeprefix(_UPLOAD_OF))
    async with _receiving(request, services, link.tenant, limit, file) as body:
        content = await asyncio.to_thread(body.read)
        free_bytes = shutil.disk_usage(settings.data_dir).free - len(content)
        if blobs.folder and free_bytes < settings.disk_reserve_bytes:
            raise Refused(Reason.DISK_RESERVE_REACHED)
        try:
            await asyncio.to_thread(pending.put, file, content)
        except OSError as error:
            raise _unavailable(error) from error
    return Response()


def _unavailable(error: OSError) -> StoreUnavailable:
    log.error("pending_upload_unavailable", reason=error.strerror)
    return StoreUnavailable("The files of uploads cannot be stored or read now. Retry later.")


def _pending(services: Services, upload: StartedUpload) -> PendingFiles:
    name = f"{upload.expires_at}-{upload.session}"
    return PendingFiles(services.settings.blob_store, upload.tenant, name)


async def _import_files(services: Services, tenant: Tenant, upload: StartedUpload) -> RunRecord:
    """Queue the import of an upload's files, if no earlier finish did, and delete them."""
    pending = _pending(services, upload)
    with services.uploads.of(tenant.id, 1):
        async with services.unpacking:
            try:
                # Before the run is looked up: files are only deleted once it exists.
                files = await asyncio.to_thread(pending.read)
            except OSError as error:
                raise _unavailable(error) from error
            try:
                return await services.records.run(tenant.id, run_id(SessionId(upload.session), 0))
            except RunNotFound:
                if upload.expires_at <= time.time():
                    raise Refused(Reason.UPLOAD_NOT_FOUND) from None
            if files is None:
                raise await asyncio.to_thread(pending.missing)
            if full := await quota_reached(services, tenant.id):
                raise Invalid(full)
            adapter = await asyncio.to_thread(read_adapter, files.config, files.tensors, SEED)
            _check_config(adapter.lora, upload)
            pool = await services.records.pool_of(upload.base_model)
            session = await services.records.create_session(
                tenant.id, sdk_version="upload", key_id=tenant.key_id, project_id=upload.project,
                session_id=SessionId(upload.session),
            )  # fmt: skip
            # The kind of the SDK's reference: "external weights checkpoint".
            save = SaveRequest(name=NAME, kind="external_weights", last=True)
            run = await _queue(services, _Wanted(tenant, pool, session, 0, save), adapter)
        try:
            await asyncio.to_thread(pending.delete)
        except OSError as error:  # they expire
            log.warning("pending_upload_not_deleted", reason=error.strerror)
    return run


def _check_config(files: LoraSpec, upload: StartedUpload) -> None:
    """Raise Invalid if the files have another rank or other modules than the start named."""
    names = ("rank", "train_attn", "train_mlp", "train_unembed")
    found = {name: getattr(files, name) for name in names}
    if found != {name: getattr(upload, name) for name in names}:
        words = ", ".join(f"{name}={value}" for name, value in found.items())
        raise Invalid(f"lora_config differs from the files, which have {words}. Start an upload with these.")


async def _pool_of(services: Services, config: bytes) -> PoolRecord:
    named = read_object(CONFIG, config).get("base_model_name_or_path")
    pools = await services.records.served_pools()
    fitting = [pool for pool in pools if pool.base_model == named] or pools
    if len(fitting) != 1:
        served = ", ".join(pool.base_model for pool in pools)
        raise Invalid(f"{CONFIG}: base_model_name_or_path must be one of the base models served here ({served}).")
    return fitting[0]


async def _await_op(services: Services, run: RunRecord, seq: int, patience_s: float) -> None:
    """Wait until an op is done.

    Raises:
        Invalid: the op failed; the message is its error.
        StoreUnavailable: the op is not done after `patience_s`, or this process drains.
    """
    end = time.monotonic() + patience_s
    while not services.draining and (left_s := end - time.monotonic()) > 0:
        outcome = await services.futures.wait(run.tenant, request_id(run.id, seq), left_s)
        if isinstance(outcome, Pending):
            continue
        if outcome.kind is ResultKind.FAILURE:
            raise Invalid(outcome.json()["error"])
        return
    raise StoreUnavailable(f"The upload is queued, but not stored yet; it will be {run.id}.")


async def _read_query(services: Services, tenant: Tenant, query: wire.UploadQuery) -> _Wanted:
    save, pool = _save_request(query), await services.records.pool_of(query.base_model)
    if (query.session_id is None) != (query.model_seq_id is None):
        raise Invalid("Send session_id and model_seq_id together, or neither.")
    session = None
    if query.session_id is not None:
        session = await services.records.open_session(tenant.id, query.session_id)
    return _Wanted(tenant, pool, session, query.model_seq_id or 0, save)


def _save_request(query: wire.UploadQuery) -> SaveRequest:
    check_name(query.name)
    check_ttl(query.ttl_seconds)
    metadata = read_object("user_metadata", (query.user_metadata or "{}").encode())
    if not all(isinstance(text, str) for text in metadata.values()):
        raise Invalid("user_metadata must map names to texts.")
    check_metadata(metadata)
    return SaveRequest(
        name=query.name, kind="weights", ttl_seconds=query.ttl_seconds, user_metadata=metadata, last=True
    )


@asynccontextmanager
async def _receiving(
    request: Request, services: Services, tenant: TenantId, limit_bytes: int, name: str = "Upload"
) -> AsyncIterator[IO[bytes]]:
    """Receive a body as one of the tenant's uploads. Within the block, no other upload is unpacked."""
    settings, folder = services.settings, services.settings.data_dir / FOLDER
    with services.uploads.of(tenant, 1):
        async with (
            received(request, folder, limit_bytes, settings.disk_reserve_bytes, name) as body,
            services.unpacking,
        ):
            yield body


async def _queue(services: Services, wanted: _Wanted, adapter: PeftAdapter) -> RunRecord:
    check_rank(adapter.lora.rank, min(wanted.pool.max_rank, services.settings.max_rank))
    body, digest = await asyncio.to_thread(_encode, adapter, wanted)
    session = wanted.session or await services.records.create_session(
        wanted.owner.id, sdk_version="upload", key_id=wanted.owner.key_id
    )
    run = new_run(session, wanted.model_seq_id, wanted.pool, adapter.lora, {"upload_sha256": digest})
    details = {"tinker_path": wanted.path_in(run)}
    try:
        async with services.audit.act(wanted.owner, AuditEvent.CHECKPOINT_UPLOAD, details):
            await services.intake.create_run(run, kind=OpKind.IMPORT, body=body, digest=digest, save=wanted.body)
    except (RunClosed, SeqConflict):
        known = await services.records.run(run.tenant, run.id)
        if known.user_metadata != run.user_metadata:
            raise
        # Repeated by a client that did not receive the answer: the import is already done.
    return run


def _read_archive(archive: IO[bytes], limit_bytes: int) -> PeftAdapter:
    files = unpack(archive, limit_bytes)
    return read_adapter(files.config, files.tensors, SEED)


def _encode(adapter: PeftAdapter, wanted: _Wanted) -> tuple[bytes, str]:
    """Return the body of the import, and a digest of the whole request."""
    body = encode_import(adapter)
    hasher = hashlib.sha256(wanted.pool.base_model.encode() + b"\0" + wanted.body + b"\0")
    hasher.update(body)  # without a copy
    return body, hasher.hexdigest()
