"""Endpoints to delete, publish, expire and copy checkpoints.

The endpoints find every checkpoint that the tenant may read. The store ensures that only its owner can change it.
"""

import hashlib
import secrets
import time
from typing import Annotated, get_args

from fastapi import Header, HTTPException, Request

from cotrain.wire.checkpoints import CheckpointTtlRequest, CopyWeightsRequest, CopyWeightsResponse
from cotrain_server.errors import Invalid
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, tenant_router
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
from cotrain_store.errors import MalformedPath, RunNotFound
from cotrain_store.messages.ids import RunId, SessionId, TenantId, run_id
from cotrain_store.messages.runs import CheckpointKind, CheckpointRecord, RunRecord, RunState, Tenant
from cotrain_store.tenants.audit_log import AuditEvent

router = tenant_router("checkpoints")

KINDS = get_args(CheckpointKind)

#: Metadata key of a copy's run. Its value is the source path.
COPIED_FROM = "copied_from"


@router.delete(CHECKPOINT, status_code=204)
async def delete_checkpoint(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> None:
    """Delete a checkpoint's name. Runs and samplers that loaded it, or are loading it, are unaffected."""
    found = await services.records.checkpoint(tenant.id, path_of(run_id, kind, name))
    details = {"tinker_path": found.path}
    async with services.audit.act(tenant, AuditEvent.CHECKPOINT_DELETE, details):
        await services.checkpoints.delete(tenant.id, found.run, found.kind, found.name)


@router.post(f"{CHECKPOINT}/publish", status_code=204)
async def publish_checkpoint(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> None:
    """Publish a checkpoint: every tenant of this server may load, sample and download it."""
    found = await services.records.checkpoint(tenant.id, path_of(run_id, kind, name))
    await _publish(services, tenant, found, public=True)


@router.delete(f"{CHECKPOINT}/publish", status_code=204)
async def unpublish_checkpoint(run_id: str, kind: str, name: str, services: ServicesDep, tenant: TenantDep) -> None:
    """Unpublish a checkpoint. Copies that other tenants made stay theirs."""
    found = await services.records.checkpoint(tenant.id, path_of(run_id, kind, name))
    await _publish(services, tenant, found, public=False)


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


async def _publish(services: Services, tenant: Tenant, found: CheckpointRecord, *, public: bool) -> None:
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
    if kind in KINDS:
        raise HTTPException(405)
    raise MalformedPath(
        f"Checkpoint id {(kind or name)!r:.100} is malformed. Use weights/<name> or sampler_weights/<name>."
    )


# ---- Copy ----------------------------------------------------------------------------------------


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
