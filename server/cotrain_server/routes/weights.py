"""save_weights_for_sampler: keep a run's weights as they are, under a name or for one sampler."""

from __future__ import annotations

from fastapi import APIRouter, Request

from cotrain.types import SaveWeightsForSamplerRequest, UntypedAPIFuture
from cotrain_server.bodies import json_body
from cotrain_server.deps import ServicesDep, TenantDep, api_key
from cotrain_server.gate import TenantRoute
from cotrain_server.openapi import body_of
from cotrain_server.reading import read_fields, save_op
from cotrain_server.routes.training import submit

router = APIRouter(
    prefix="/api/v1", tags=["weights"], route_class=TenantRoute, dependencies=[api_key]
)


@router.post(
    "/save_weights_for_sampler",
    response_model_exclude_none=True,
    openapi_extra=body_of(SaveWeightsForSamplerRequest),
)
async def save_weights_for_sampler(
    request: Request, services: ServicesDep, tenant: TenantDep
) -> UntypedAPIFuture:
    """Queue a copy of the weights that all requests before this one add up to.

    Of `kind` inflight a snapshot is made as well: its sampler never sees later weights.
    """
    save = read_fields(await json_body(request))
    run = await services.records.run(tenant.id, save.model_id)
    return await submit(services, run, save.seq, save_op(save, run))
