"""Endpoints of runs: create, describe and close a run, list and label runs, read a run's history."""

import hashlib
import re
import time
from typing import Annotated, Literal

from fastapi import Query, Request, Response

from cotrain.wire import rest as wire
from cotrain.wire.model import Name
from cotrain.wire.runs import (
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    OptimizerConfig,
    UnloadModelRequest,
    UntypedAPIFuture,
)
from cotrain_server.errors import Invalid
from cotrain_server.http.auth import is_local
from cotrain_server.http.tenant_routes import Limit, Offset, Scope, ServicesDep, TenantDep, tenant_router
from cotrain_server.requests.checkpoint_validation import check_metadata
from cotrain_server.requests.pass_validation import check_rank
from cotrain_server.requests.submission import new_run
from cotrain_server.services import Services
from cotrain_server.text_apis.tokenizer_cache import published_tokenizer
from cotrain_server.views.records import csv_of, training_run_of
from cotrain_server.views.waiting import read_why
from cotrain_store.messages.ids import RunId, run_id
from cotrain_store.messages.runs import LoraSpec, PoolRecord
from cotrain_store.oplog.reader import oldest_rewind
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.history import read_history, read_metrics
from cotrain_store.tenants.run_labels import LabelQuery

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

router = tenant_router("runs")


@router.post("/create_model", response_model_exclude_none=True)
async def create_model(request: CreateModelRequest, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue the creation of a new adapter.

    An invalid request is refused at once, because it has no position in an order. Idempotent: the
    run's id is derived from the session and the client's own number.
    """
    session = await services.records.open_session(tenant.id, request.session_id)
    check_metadata(request.user_metadata)
    pool = await services.records.pool_of(request.base_model)
    check_rank(request.lora_config.rank, min(pool.max_rank, services.settings.max_rank))
    lora = _lora_spec(run_id(session.id, request.model_seq_id), request.lora_config, request.optimizer_config.type)
    run = new_run(session, request.model_seq_id, pool, lora, request.user_metadata)
    request_id = await services.intake.create_run(run)
    if request.note or request.tags:
        max_bytes = (await services.quotas.of(tenant.id)).record_bytes
        await services.run_labels.set(run, max_bytes, note=request.note, tags=request.tags)
    return UntypedAPIFuture(request_id=request_id, model_id=run.id)


@router.post("/get_info")
async def get_info(
    wanted: GetInfoRequest, request: Request, services: ServicesDep, tenant: TenantDep
) -> GetInfoResponse:
    """Describe a run. SDKs load its tokenizer by the id returned here."""
    run = await services.records.run(tenant.id, wanted.model_id)
    pool = await services.records.pool(run.pool)
    return GetInfoResponse(
        model_data=ModelData(
            arch=pool.architecture if pool else None,
            model_name=run.base_model,
            tokenizer_id=await _tokenizer_id(run.base_model, pool, request, services),
        ),
        model_id=run.id,
        is_lora=True,
        lora_rank=run.lora.rank,
        lora_alpha=run.lora.alpha,
        model_name=run.base_model,
        optimizer_config=OptimizerConfig.model_validate({"type": run.lora.optimizer}),
        weights_epoch=run.weights_epoch,
        rolled_back_to=run.rolled_back_to or None,
    )


@router.post("/unload_model", response_model_exclude_none=True)
async def unload_model(request: UnloadModelRequest, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Close a run. Pending ops fail, running ops finish, nothing is saved."""
    run = await services.records.run(tenant.id, request.model_id)
    request_id = await services.intake.close_run(run)
    return UntypedAPIFuture(request_id=request_id, model_id=run.id)


async def _tokenizer_id(base_model: str, pool: PoolRecord | None, request: Request, services: Services) -> str:
    """Return a name that transformers can load: a hub id, or on this host a folder for a model outside any hub."""
    if pool is None or _HUB_ID.fullmatch(base_model) or not is_local(request):
        return base_model
    return str(await published_tokenizer(pool, services.settings) or base_model)


def _lora_spec(run: RunId, config: LoraConfig, optimizer: str) -> LoraSpec:
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise Invalid("lora_config: at least one of train_attn, train_mlp, train_unembed is needed.")
    # Derived from the run's id, so that a repeated request creates the same run.
    seed = int.from_bytes(hashlib.sha256(run.encode()).digest()[:6])
    return LoraSpec(
        rank=config.rank,
        seed=seed if config.seed is None else config.seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        alpha=config.alpha,
        optimizer=optimizer,
    )


lists_router = tenant_router("lists")

AfterStep = Annotated[int, Query(ge=-1, lt=2**53)]


@lists_router.get("/training_runs")
async def list_training_runs(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Name | None = None,
    tag: Annotated[list[wire.Tag] | None, Query(max_length=16)] = None,
    text: Annotated[str | None, Query(min_length=1, max_length=1024)] = None,
) -> wire.TrainingRunsResponse:
    """List your runs; with `accessible`, also other tenants' runs that have a published checkpoint.

    The filters return only your own runs: those of a `project_id`, those with every `tag`
    (repeatable), and those with the words of `text` in their note.
    """
    catalog = services.catalog
    labels = LabelQuery(tuple(tag or ()), text or "")
    if labels:
        async with services.scans.of(tenant.id):
            found = await services.run_labels.matching(tenant.id, labels)
        page = await catalog.runs(tenant.id, offset, limit, project_id, found)
    elif access_scope == "accessible" and project_id is None:
        page = await catalog.accessible_runs(tenant.id, offset, limit)
    else:
        page = await catalog.runs(tenant.id, offset, limit, project_id)
    own = [entry.run for entry in page.items if entry.run.tenant == tenant.id]
    positions = await services.run_list.positions(own, time.time())
    return wire.TrainingRunsResponse(
        training_runs=[training_run_of(entry, tenant.id, positions.get(entry.run.id)) for entry in page.items],
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=page.total_count),
    )


@lists_router.get("/training_runs/{run_id}")
async def get_training_run(
    run_id: str, services: ServicesDep, tenant: TenantDep, access_scope: Scope = "owned"
) -> wire.TrainingRun:
    """Show one run."""
    accessible = access_scope == "accessible"
    entry = await services.catalog.run(tenant.id, run_id, accessible=accessible)
    if entry.run.tenant != tenant.id:
        return training_run_of(entry, tenant.id)
    positions = await services.run_list.positions([entry.run], time.time())
    shown = training_run_of(entry, tenant.id, positions[entry.run.id])
    notice = await services.futures.reasons.gap_notice(entry.run.pool, entry.run.id)
    oldest = await oldest_rewind(services.connection, entry.run.pool, entry.run.id)
    return shown.model_copy(update={"waiting": notice, "rewind_from": oldest})


@lists_router.get("/training_runs/{run_id}/why")
async def get_wait_reason(run_id: str, services: ServicesDep, tenant: TenantDep) -> wire.WaitReason:
    """Return the cause for which a run waits, in one sentence."""
    run = await services.records.run(tenant.id, run_id)
    positions = await services.run_list.positions([run], time.time())
    return await read_why(services, run, positions[run.id])


@lists_router.patch("/training_runs/{run_id}")
async def update_training_run(
    run_id: str, changes: wire.UpdateTrainingRunRequest, services: ServicesDep, tenant: TenantDep
) -> wire.TrainingRun:
    """Set a run's note or tags, by which lists and searches find it."""
    run = await services.records.run(tenant.id, run_id)
    max_bytes = (await services.quotas.of(tenant.id)).record_bytes
    async with services.audit.act(tenant, AuditEvent.RUN_LABEL, {"run": run.id}):
        await services.run_labels.set(run, max_bytes, note=changes.note, tags=changes.tags)
    entry = await services.catalog.run(tenant.id, run_id, accessible=False)
    return training_run_of(entry, tenant.id)


@lists_router.get(
    "/training_runs/{run_id}/history",
    response_model=wire.TrainingRunHistory,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def get_history(
    run_id: str,
    request: Request,
    services: ServicesDep,
    tenant: TenantDep,
    after_step: AfterStep = -1,
    format: Literal["json", "csv"] | None = None,
) -> wire.TrainingRunHistory | Response:
    """Return the results of a run's optimizer steps and evaluations after a given step.

    The format is CSV with `format=csv`, or if `Accept` contains text/csv.
    """
    run = await services.records.run(tenant.id, run_id)
    points = await read_history(services.connection, run.id, after_step)
    wants_csv = "text/csv" in request.headers.get("accept", "") if format is None else format == "csv"
    if wants_csv:
        return Response(csv_of(points), media_type="text/csv")
    metrics = await read_metrics(services.connection, run.id, after_step)
    return wire.TrainingRunHistory(training_run_id=run.id, points=points, metrics=metrics)
