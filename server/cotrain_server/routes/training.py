"""Endpoints forward, forward_backward and optim_step: check, accept, and answer at once.

A POST never waits for work. SDKs send the chunks of one call in parallel and the first one last, so
an answer that waited for an earlier chunk would never end.
"""

from functools import partial

from fastapi import Request

from cotrain.wire.pass_codec import PROTOBUF
from cotrain.wire.runs import (
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    UntypedAPIFuture,
)
from cotrain_server.errors import BodyTooLarge
from cotrain_server.http.request_body import body_weight, is_json, is_protobuf, json_body
from cotrain_server.http.tenant_routes import (
    DataRoute,
    ServicesDep,
    TenantDep,
    queued_body,
    tenant_router,
)
from cotrain_server.requests.passes import (
    Op,
    ParsedPass,
    pass_op,
    read_binary_pass,
    read_json_pass,
    read_step,
    step_op,
)
from cotrain_server.requests.submission import idempotency_key, submit
from cotrain_server.services import Services
from cotrain_store.errors import BaseModelNotServed, Reason, Refused
from cotrain_store.messages.runs import PoolRecord, Tenant

router = tenant_router("training", kind=DataRoute)


@router.post("/forward_backward", **queued_body(ForwardBackwardRequest, binary=True))
async def forward_backward(
    request: Request, services: ServicesDep, tenant: TenantDep
) -> UntypedAPIFuture:
    """Queue a pass that adds to the run's gradient, or with `forward_only` one without a gradient."""
    return await _queue_pass(request, services, tenant, forward_only=False)


@router.post("/forward", **queued_body(ForwardRequest, binary=True))
async def forward(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a pass without a gradient."""
    return await _queue_pass(request, services, tenant, forward_only=True)


@router.post("/optim_step", **queued_body(OptimStepRequest))
async def optim_step(
    request: Request, services: ServicesDep, tenant: TenantDep
) -> UntypedAPIFuture:
    """Queue one AdamW step on the accumulated gradient."""
    content = await json_body(request)
    step = await services.parser.parse_json(tenant.id, body_weight(request), read_step, content)
    run = await services.records.run(tenant.id, step.model_id)
    return await submit(services, run, step.seq, step_op(step), idempotency_key(request))


async def _queue_pass(
    request: Request, services: Services, tenant: Tenant, *, forward_only: bool
) -> UntypedAPIFuture:
    body, weight = await request.body(), body_weight(request)
    if is_protobuf(request):
        read = partial(read_binary_pass, body, forward_only=forward_only)
        addressed = await services.parser.run(tenant.id, weight, read)
    elif is_json(request):
        read = partial(read_json_pass, body, forward_only=forward_only)
        addressed = await services.parser.parse_json(tenant.id, weight, read)
    else:
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, f"Send application/json or {PROTOBUF}.")
    run = await services.records.run(tenant.id, addressed.model_id)
    pool = await services.records.pool(run.pool)
    if pool is None:
        raise BaseModelNotServed(f"Base model {run.base_model!r} is not served here any more.")
    op = await _pass_op(services, tenant, weight, addressed, pool, is_json=not is_protobuf(request))
    return await submit(services, run, addressed.seq, op, idempotency_key(request))


async def _pass_op(
    services: Services,
    tenant: Tenant,
    weight: int,
    addressed: ParsedPass,
    pool: PoolRecord,
    *,
    is_json: bool,
) -> Op:
    """Return the op of a pass, or a rejected op if the pass exceeds the limits of parsing."""
    parser = services.parser
    try:
        if addressed.has_images or not addressed.is_read:
            return await parser.run_in_child(tenant.id, pass_op, addressed, pool)
        if is_json:
            return await parser.parse_json(tenant.id, weight, pass_op, addressed, pool)
        return await parser.run(tenant.id, weight, pass_op, addressed, pool)
    except BodyTooLarge as refused:
        return await parser.run(tenant.id, weight, Op.rejected, str(refused), addressed.content)
