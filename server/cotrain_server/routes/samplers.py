"""Endpoints create_sampling_session, samplers/{id} and asample: create samplers and queue sample requests.

asample checks, accepts and answers at once. A sample request waits for no cycle, and for no other sample request.
"""

import time

from fastapi import Request

from cotrain.wire.runs import UntypedAPIFuture
from cotrain.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
)
from cotrain_server.errors import Invalid
from cotrain_server.http.request_body import body_weight, json_body
from cotrain_server.http.tenant_routes import DataRoute, ServicesDep, TenantDep, queued_body, tenant_router
from cotrain_server.requests.checkpoint_validation import check_loadable
from cotrain_server.requests.images import insert_images
from cotrain_server.requests.samples import check_sample, check_sampleable, read_sample
from cotrain_server.services import Services
from cotrain_store.errors import BaseModelNotServed
from cotrain_store.messages.ids import TenantId, sampler_id
from cotrain_store.messages.runs import CheckpointRecord, SamplerRecord

router = tenant_router("sampling")


@router.post("/create_sampling_session")
async def create_sampling_session(
    request: CreateSamplingSessionRequest, services: ServicesDep, tenant: TenantDep
) -> CreateSamplingSessionResponse:
    """Create a sampler of a base model, or of saved weights. Later changes of the path do not affect it.

    Idempotent: the sampler's id is derived from the session and the client's own number.
    """
    session = await services.records.open_session(tenant.id, request.session_id)
    base_model, checkpoint = await _source(request, services, tenant.id)
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
        weights=checkpoint.weights if checkpoint else None,
        ephemeral=False,
        created_at=time.time(),
        step=checkpoint.step if checkpoint else None,
    )
    sampler = await services.records.create_sampler(sampler)
    return CreateSamplingSessionResponse(sampling_session_id=sampler.id)


@router.get("/samplers/{sampling_session_id}")
async def get_sampler(sampling_session_id: str, services: ServicesDep, tenant: TenantDep) -> GetSamplerResponse:
    """Describe a sampler. Clients read the name of its tokenizer here."""
    sampler = await services.records.sampler(tenant.id, sampling_session_id)
    return GetSamplerResponse(sampler_id=sampler.id, base_model=sampler.base_model, model_path=sampler.model_path)


async def _source(
    request: CreateSamplingSessionRequest, services: Services, tenant: TenantId
) -> tuple[str, CheckpointRecord | None]:
    """Return the base model, and the checkpoint of a path. A path takes precedence over a base model."""
    if request.model_path is not None:
        checkpoint = await services.records.checkpoint(tenant, request.model_path)
        await check_loadable(services, checkpoint)
        return checkpoint.base_model, checkpoint
    if request.base_model is not None:
        return request.base_model, None
    raise Invalid("One of base_model and model_path is needed.")


sampling_router = tenant_router("sampling", kind=DataRoute)


@sampling_router.post("/asample", **queued_body(SampleRequest))
async def asample(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a sample request.

    Idempotent: the client's own number identifies it. Above the tenant's quota the answer is 429,
    and SDKs slow down and send the same number again.
    """
    content, weight = await json_body(request), body_weight(request)
    sample = await services.parser.parse_json(tenant.id, weight, read_sample, content)
    sampler = await services.records.sampler(tenant.id, sample.sampler)
    pool = await services.records.pool(sampler.pool)
    if pool is None:
        raise BaseModelNotServed(f"Base model {sampler.base_model!r} is not served here any more.")
    body = sample.body
    if sample.images:
        body = await services.parser.run_in_child(tenant.id, insert_images, body, sample.images, pool)
    await services.parser.run(tenant.id, weight, check_sample, body, pool)
    longest = pool.max_sequence_tokens
    request_id = await services.sample_intake.submit(sampler, sample.seq, body, longest)
    # SDK 0.38 requires exactly one id per sequence.
    names = [f"{request_id}:{number}" for number in range(sample.body.num_samples)]
    return UntypedAPIFuture(request_id=request_id, sample_sequence_ids=names)
