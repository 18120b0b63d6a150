"""asample: check, accept, answer at once. It waits for no cycle of the clock, and for no other one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from cotrain.wire.futures import UntypedAPIFuture
from cotrain.wire.sampling import SampleRequest
from cotrain_server.http.dependencies import ServicesDep, TenantDep, api_key
from cotrain_server.http.openapi import body_of
from cotrain_server.http.request_body import body_weight, json_body
from cotrain_server.http.tenant_routes import DataRoute
from cotrain_server.requests.sample_validation import check_sample
from cotrain_server.requests.samples import read_sample
from cotrain_store.errors import BaseModelNotServed

if TYPE_CHECKING:
    from cotrain_store.messages.ids import RequestId

router = APIRouter(
    prefix="/api/v1", tags=["sampling"], route_class=DataRoute, dependencies=[api_key]
)


@router.post("/asample", response_model_exclude_none=True, openapi_extra=body_of(SampleRequest))
async def asample(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a sample request.

    Twice is harmless: the client's own number for it names it. Over the tenant's quota the answer
    is 429, and SDKs slow down and send the same number again.
    """
    content, weight = await json_body(request), body_weight(request)
    sample = await services.parser.parse_json(tenant.id, weight, read_sample, content)
    sampler = await services.records.sampler(tenant.id, sample.sampler)
    pool = await services.records.pool(sampler.pool)
    if pool is None:
        raise BaseModelNotServed(f"Base model {sampler.base_model!r} is not served here any more.")
    await services.parser.run(tenant.id, weight, check_sample, sample.body, pool)
    longest = pool.max_sequence_tokens
    request_id = await services.sample_intake.submit(sampler, sample.seq, sample.body, longest)
    return UntypedAPIFuture(
        request_id=request_id,
        sample_sequence_ids=_sequence_ids(request_id, sample.body.num_samples),
    )


def _sequence_ids(request: RequestId, num_samples: int) -> list[str]:
    """Name each sequence; SDK 0.38 takes no answer without exactly as many names."""
    return [f"{request}:{number}" for number in range(num_samples)]
