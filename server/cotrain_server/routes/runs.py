"""Endpoints create_model, get_info and unload_model: create, describe and close a run."""

import hashlib
import re

from fastapi import Request

from cotrain.wire import runs as wire
from cotrain_server.errors import Invalid
from cotrain_server.http.auth import is_local
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, tenant_router
from cotrain_server.requests.checkpoint_validation import check_metadata
from cotrain_server.requests.pass_validation import check_rank
from cotrain_server.requests.submission import new_run
from cotrain_server.services import Services
from cotrain_server.text_apis.tokenizer_cache import published_tokenizer
from cotrain_store.messages.ids import RunId, run_id
from cotrain_store.messages.runs import LoraSpec, PoolRecord

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

router = tenant_router("runs")


@router.post("/create_model", response_model_exclude_none=True)
async def create_model(
    request: wire.CreateModelRequest, services: ServicesDep, tenant: TenantDep
) -> wire.UntypedAPIFuture:
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
        most = (await services.quotas.of(tenant.id)).record_bytes
        await services.run_labels.set(run, most, note=request.note, tags=request.tags)
    return wire.UntypedAPIFuture(request_id=request_id, model_id=run.id)


@router.post("/get_info")
async def get_info(
    wanted: wire.GetInfoRequest, request: Request, services: ServicesDep, tenant: TenantDep
) -> wire.GetInfoResponse:
    """Describe a run. SDKs load its tokenizer by the id returned here."""
    run = await services.records.run(tenant.id, wanted.model_id)
    pool = await services.records.pool(run.pool)
    return wire.GetInfoResponse(
        model_data=wire.ModelData(
            arch=pool.architecture if pool else None,
            model_name=run.base_model,
            tokenizer_id=await _tokenizer_id(run.base_model, pool, request, services),
        ),
        model_id=run.id,
        is_lora=True,
        lora_rank=run.lora.rank,
        lora_alpha=run.lora.alpha,
        model_name=run.base_model,
        optimizer_config=wire.OptimizerConfig.model_validate({"type": run.lora.optimizer}),
        weights_epoch=run.weights_epoch,
        rolled_back_to=run.rolled_back_to or None,
    )


@router.post("/unload_model", response_model_exclude_none=True)
async def unload_model(
    request: wire.UnloadModelRequest, services: ServicesDep, tenant: TenantDep
) -> wire.UntypedAPIFuture:
    """Close a run. Pending ops fail, running ops finish, nothing is saved."""
    run = await services.records.run(tenant.id, request.model_id)
    request_id = await services.intake.close_run(run)
    return wire.UntypedAPIFuture(request_id=request_id, model_id=run.id)


async def _tokenizer_id(base_model: str, pool: PoolRecord | None, request: Request, services: Services) -> str:
    """Return a name that transformers can load: a hub id, or on this host a folder for a model outside any hub."""
    if pool is None or _HUB_ID.fullmatch(base_model) or not is_local(request):
        return base_model
    return str(await published_tokenizer(pool, services.settings) or base_model)


def _lora_spec(run: RunId, config: wire.LoraConfig, optimizer: str) -> LoraSpec:
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
