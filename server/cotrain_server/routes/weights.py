"""Endpoints save_weights, save_weights_for_sampler, save_weights_external and weights_info."""

from fastapi import Request

from cotrain.wire.checkpoints import (
    OptimizerChoice,
    SaveWeightsExternalRequest,
    SaveWeightsRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from cotrain.wire.runs import UntypedAPIFuture
from cotrain.wire.sampling import SaveWeightsForSamplerRequest
from cotrain_server.http.request_body import json_body
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, queued_body, tenant_router
from cotrain_server.requests.checkpoint_validation import find_source, quota_reached
from cotrain_server.requests.checkpoints import save_op
from cotrain_server.requests.passes import read_fields
from cotrain_server.requests.submission import submit
from cotrain_server.services import Services
from cotrain_store.messages.runs import CheckpointKind, Tenant

router = tenant_router("weights")


@router.post("/save_weights", **queued_body(SaveWeightsRequest))
async def save_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a save of the weights and the optimizer state, from which training can resume."""
    return await _save(request, services, tenant, "weights")


@router.post("/save_weights_for_sampler", **queued_body(SaveWeightsForSamplerRequest))
async def save_weights_for_sampler(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a save of the weights after all earlier requests.

    With `kind` inflight, a snapshot is made as well: its sampler never sees later weights.
    """
    return await _save(request, services, tenant, "sampler_weights")


@router.post("/save_weights_external", **queued_body(SaveWeightsExternalRequest))
async def save_weights_external(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue files for download, encrypted if recipients are given."""
    return await _save(request, services, tenant, "external_weights")


async def _save(request: Request, services: Services, tenant: Tenant, kind: CheckpointKind) -> UntypedAPIFuture:
    save = read_fields(await json_body(request))
    run = await services.records.run(tenant.id, save.model_id)
    op = save_op(save, run, kind)
    full = ""
    if save.fields.get("sampling_session_seq_id") is None:
        full = await quota_reached(services, tenant.id)
    return await submit(services, run, save.seq, op.refused(full) if full else op)


@router.post("/weights_info")
async def weights_info(wanted: WeightsInfoRequest, services: ServicesDep, tenant: TenantDep) -> WeightsInfoResponse:
    """Return the properties that a run needs to load a checkpoint."""
    weights = (await find_source(services, tenant.id, wanted.tinker_path)).weights
    return WeightsInfoResponse(
        base_model=weights.base_model,
        lora_rank=weights.lora.rank,
        lora_alpha=weights.lora.alpha,
        train_unembed=weights.lora.train_unembed,
        train_mlp=weights.lora.train_mlp,
        train_attn=weights.lora.train_attn,
        optimizer_config=OptimizerChoice(type=weights.lora.optimizer),
    )
