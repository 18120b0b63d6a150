"""training_runs/upload: bring an adapter that was made elsewhere.

It becomes a run of its own, whose first op imports it and whose second saves it under the name that the
tenant gives. From then on it is a checkpoint like any other: loaded, sampled from, trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from typing_extensions import override

from cotrain.upload_types import UploadQuery, UploadResponse
from cotrain_server.archive import unpack
from cotrain_server.auth import authenticate
from cotrain_server.checkpoint_validation import check_metadata, check_name, check_ttl
from cotrain_server.deps import ServicesDep, TenantDep, api_key
from cotrain_server.errors import Invalid
from cotrain_server.peft_reading import read_adapter
from cotrain_server.routes.weights import quota_reached
from cotrain_server.strict_json import read_object
from cotrain_server.uploads import received
from cotrain_server.validation import check_rank
from cotrain_store.audit import AuditEvent
from cotrain_store.errors import RunClosed, SeqConflict, SessionFinished
from cotrain_store.imports import PeftAdapter, encode_import
from cotrain_store.messages.encoding import encode
from cotrain_store.messages.ids import request_id, run_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.messages.saves import SaveRequest

if TYPE_CHECKING:
    from fastapi import Response

    from cotrain_server.gate import Handler
    from cotrain_server.services import Services
    from cotrain_store.messages.ids import TenantId
    from cotrain_store.messages.pools import PoolRecord
    from cotrain_store.messages.runs import LoraSpec
    from cotrain_store.messages.sessions import SessionRecord, Tenant

#: What an upload leaves out begins the same way in every run.
SEED = 0
FOLDER = "uploads"
ARCHIVE = {
    "requestBody": {
        "required": True,
        "description": "A tar (plain, gzip or zstd) or zip with adapter_config.json and "
        "adapter_model.safetensors.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@dataclass(frozen=True)
class _Wanted:
    """What an upload is to become, as far as its query says it."""

    tenant: TenantId
    pool: PoolRecord
    session: SessionRecord | None  # None: one of its own, once the archive is read
    model_seq_id: int
    save: bytes  # the body of the op


class UploadRoute(APIRoute):
    """A route that knows its tenant, and then reads its body by itself, piece by piece."""

    @override
    def get_route_handler(self) -> Handler:
        """Put the key before the route."""
        handle = super().get_route_handler()

        async def pass_gate(request: Request) -> Response:
            request.state.tenant = await authenticate(request, request.app.state.services)
            return await handle(request)

        return pass_gate


router = APIRouter(
    prefix="/api/v1", tags=["uploads"], route_class=UploadRoute, dependencies=[api_key]
)


@router.post("/training_runs/upload", response_model_exclude_none=True, openapi_extra=ARCHIVE)
async def upload_checkpoint(
    request: Request,
    query: Annotated[UploadQuery, Query()],
    services: ServicesDep,
    tenant: TenantDep,
) -> UploadResponse:
    """Queue the import of an archive's adapter as a checkpoint of a new run.

    What is wrong with its files is said here and now; whether they fit the base model, by the future.
    """
    wanted = await _read_query(services, tenant, query)
    if full := await quota_reached(services, tenant.id):
        raise Invalid(full)
    with services.uploads.slot(tenant.id):
        run = await _import(request, services, wanted)
    path = f"tinker://{run.id}/weights/{query.name}"
    await services.audit.note(tenant.id, AuditEvent.CHECKPOINT_UPLOAD, {"tinker_path": path})
    return UploadResponse(
        request_id=request_id(run.id, 1),
        model_id=run.id,
        import_request_id=request_id(run.id, 0),
        path=path,
    )


async def _read_query(services: Services, tenant: Tenant, query: UploadQuery) -> _Wanted:
    save, pool = _save_request(query), await services.records.pool_of(query.base_model)
    if (query.session_id is None) != (query.model_seq_id is None):
        raise Invalid("session_id and model_seq_id are given together, or neither is.")
    session = None
    if query.session_id is not None:
        session = await services.records.session(tenant.id, query.session_id)
        if session.finished_at is not None:
            raise SessionFinished
    return _Wanted(tenant.id, pool, session, query.model_seq_id or 0, encode(save).encode())


def _save_request(query: UploadQuery) -> SaveRequest:
    check_name(query.name)
    check_ttl(query.ttl_seconds)
    metadata = read_object("user_metadata", (query.user_metadata or "{}").encode())
    if not all(isinstance(text, str) for text in metadata.values()):
        raise Invalid("user_metadata must map names to texts.")
    check_metadata(metadata)
    return SaveRequest(
        name=query.name,
        kind="weights",
        ttl_seconds=query.ttl_seconds,
        user_metadata=metadata,
        last=True,
    )


async def _import(request: Request, services: Services, wanted: _Wanted) -> RunRecord:
    """Receive and unpack an archive, and queue both ops of the run that it becomes."""
    settings = services.settings
    folder, limit = settings.data_dir / FOLDER, settings.max_upload_bytes
    async with (
        received(request, folder, limit, settings.disk_reserve_bytes) as archive,
        services.uploads.unpacking,
    ):
        adapter = await asyncio.to_thread(_read_archive, archive, limit)
        check_rank(adapter.lora.rank, min(wanted.pool.max_rank, settings.max_rank))
        body, digest = await asyncio.to_thread(_encode, adapter, wanted)
        run = await _new_run(services, wanted, adapter.lora, digest)
        try:
            await services.intake.create_run(
                run, kind=OpKind.IMPORT, body=body, digest=digest, save=wanted.save
            )
        except (RunClosed, SeqConflict):
            known = await services.records.run(run.tenant, run.id)
            if known.user_metadata != run.user_metadata:
                raise
            # Sent again by who did not hear that it was imported and saved already.
    return run


async def _new_run(services: Services, wanted: _Wanted, lora: LoraSpec, digest: str) -> RunRecord:
    session = wanted.session or await services.records.create_session(
        wanted.tenant, sdk_version="upload"
    )
    return RunRecord(
        id=run_id(session.id, wanted.model_seq_id),
        tenant=wanted.tenant,
        session=session.id,
        pool=wanted.pool.id,
        base_model=wanted.pool.base_model,
        lora=lora,
        created_at=time.time(),
        user_metadata={"upload_sha256": digest},
    )


def _read_archive(archive: IO[bytes], limit_bytes: int) -> PeftAdapter:
    files = unpack(archive, limit_bytes)
    return read_adapter(files.config, files.tensors, SEED)


def _encode(adapter: PeftAdapter, wanted: _Wanted) -> tuple[bytes, str]:
    """Write the body of the import, and a digest of all that was asked for."""
    body = encode_import(adapter)
    hasher = hashlib.sha256(wanted.pool.base_model.encode())
    for part in (b"\0", wanted.save, b"\0", body):
        hasher.update(part)
    return body, hasher.hexdigest()
