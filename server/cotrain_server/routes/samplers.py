"""create_sampling_session and samplers/{id}: what a tenant samples from."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastapi import APIRouter

from cotrain.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
)
from cotrain_server.errors import Invalid
from cotrain_server.http.dependencies import ServicesDep, TenantDep, api_key
from cotrain_server.http.tenant_routes import TenantRoute
from cotrain_server.requests.checkpoint_validation import check_loadable
from cotrain_server.requests.sample_validation import check_sampleable
from cotrain_store.errors import SessionFinished
from cotrain_store.messages.ids import sampler_id
from cotrain_store.messages.samples import SamplerRecord

if TYPE_CHECKING:
    from cotrain_server.services import Services
    from cotrain_store.messages.ids import TenantId, WeightsRef

router = APIRouter(
    prefix="/api/v1", tags=["sampling"], route_class=TenantRoute, dependencies=[api_key]
)


@router.post("/create_sampling_session")
async def create_sampling_session(
    request: CreateSamplingSessionRequest, services: ServicesDep, tenant: TenantDep
) -> CreateSamplingSessionResponse:
    """Make a sampler of a base model, or of saved weights as they are now and stay for it.

    Twice is harmless: the sampler's id is made from the session and the client's own number for it.
    """
    session = await services.records.session(tenant.id, request.session_id)
    if session.finished_at is not None:
        raise SessionFinished
    base_model, weights = await _source(request, services, tenant.id)
    pool = await services.records.pool_of(base_model)
    check_sampleable(pool)
    await services.intake.check_capacity()
    sampler = SamplerRecord(
        id=sampler_id(session.id, request.sampling_session_seq_id),
        tenant=tenant.id,
        session=session.id,
        pool=pool.id,
        base_model=base_model,
        model_path=request.model_path,
        weights=weights,
        ephemeral=False,
        created_at=time.time(),
    )
    sampler = await services.records.create_sampler(sampler)
    return CreateSamplingSessionResponse(sampling_session_id=sampler.id)


@router.get("/samplers/{sampling_session_id}")
async def get_sampler(
    sampling_session_id: str, services: ServicesDep, tenant: TenantDep
) -> GetSamplerResponse:
    """Tell what a sampler samples from; clients take the name of its tokenizer from here."""
    sampler = await services.records.sampler(tenant.id, sampling_session_id)
    return GetSamplerResponse(
        sampler_id=sampler.id, base_model=sampler.base_model, model_path=sampler.model_path
    )


async def _source(
    request: CreateSamplingSessionRequest, services: Services, tenant: TenantId
) -> tuple[str, WeightsRef | None]:
    """Find the base model and the weights; a path wins over a base model."""
    if request.model_path is not None:
        checkpoint = await services.records.checkpoint(tenant, request.model_path)
        check_loadable(checkpoint)
        return checkpoint.base_model, checkpoint.weights
    if request.base_model is not None:
        return request.base_model, None
    raise Invalid("One of base_model and model_path is needed.")
