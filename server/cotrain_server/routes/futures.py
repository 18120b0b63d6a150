"""Endpoints retrieve_future, retrieve_futures and cancel_future: long polls for results, and cancellation.

They are declared as routes for the OpenAPI page. `DirectRoutes` answers their POSTs in front of the router.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

import structlog
from fastapi import APIRouter, Request, Response

from cotrain.wire.codec import PROTOBUF, pass_output_to_json, sample_response_to_json
from cotrain.wire.custom_loss import PREFIX, CreateCustomLossResponse
from cotrain.wire.runs import FutureRetrieveRequest, TryAgainResponse
from cotrain.wire.sampling import CancelFutureRequest, FutureCompletion, RetrieveFuturesRequest, RetrieveFuturesResponse
from cotrain_server.http.long_poll import Poll, Wait, trace_retrieval, try_again
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, api_key
from cotrain_server.parser import JSON_VALUE_WEIGHT
from cotrain_server.services import Services
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.messages.runs import SamplerRecord, Tenant
from cotrain_store.results.completions import Completion
from cotrain_store.results.pending import Pending

log = structlog.get_logger()

router = APIRouter(prefix="/api/v1", tags=["futures"], dependencies=[api_key])

_JSON_OF: Mapping[ResultKind, Callable[[bytes], bytes]] = {
    ResultKind.PASS: pass_output_to_json,
    ResultKind.SAMPLE: sample_response_to_json,
}
"""Results stored as protobuf messages. SDK 0.38 reads them unchanged, 0.22 may request JSON."""
_NUMBER_BYTES = 4


@router.post(
    "/retrieve_future",
    response_model=None,
    responses={
        200: {"content": {"application/json": {}, PROTOBUF: {}}},
        408: {"model": TryAgainResponse, "description": "Not yet: ask again at once."},
    },
)
async def retrieve_future(
    poll: FutureRetrieveRequest, request: Request, services: ServicesDep, tenant: TenantDep
) -> Wait | Response:
    """Return the result, or 408 after the hold time. A result can be fetched more than once.

    A fetch by a viewer does not mark the result as read, because the tenant's own clients have not read it.
    """
    name, hold_s = RequestId(poll.request_id), services.long_poll_s
    if name.startswith(PREFIX):
        made = CreateCustomLossResponse(loss_id=name).model_dump_json()
        return Response(made, media_type="application/json")
    accept = request.headers.get("accept", "")
    return partial(_result, services, tenant, name, hold_s, accept)


@router.post(
    "/retrieve_futures",
    response_model=RetrieveFuturesResponse,
    responses={408: {"model": TryAgainResponse, "description": "Not now: ask again."}},
)
async def retrieve_futures(poll: RetrieveFuturesRequest, _: Request, services: ServicesDep, tenant: TenantDep) -> Wait:
    """Return the requests of a sampler that have ended since `prev_cursor`, so one poll waits for all of them.

    A cursor removes nothing. Results reported as retrieved are deleted sooner if the key opened their session.
    """
    target, longest_s = poll.target, services.long_poll_s
    hold_s = longest_s if poll.timeout is None else min(poll.timeout, longest_s)
    sampler = await services.records.sampler(tenant.id, target.sampling_session_id)
    if poll.retrieved_request_ids and tenant.may_change:
        async with services.scans.of(tenant.id):
            await services.completions.acknowledge(sampler, poll.retrieved_request_ids, tenant.key_id)
    clone, cursor = target.cloned_sampler_id, poll.prev_cursor
    return partial(_ended, services, sampler, clone, cursor, hold_s)


@router.post("/cancel_future", status_code=204)
async def cancel_future(
    cancellation: CancelFutureRequest, _: Request, services: ServicesDep, tenant: TenantDep
) -> Response:
    """Cancel a sample request that its client no longer needs. An unknown request is ignored."""
    await services.sample_intake.cancel(tenant.id, RequestId(cancellation.request_id))
    return Response(status_code=204)


POLLS = (
    Poll(f"{router.prefix}/retrieve_future", FutureRetrieveRequest, retrieve_future),
    Poll(f"{router.prefix}/retrieve_futures", RetrieveFuturesRequest, retrieve_futures),
    Poll(f"{router.prefix}/cancel_future", CancelFutureRequest, cancel_future),
)


async def _result(services: Services, reader: Tenant, request: RequestId, hold_s: float, accept: str) -> Response:
    began, tenant = time.time(), reader.id
    key_id = reader.key_id if reader.may_change else None
    with services.polls_by_tenant.of(tenant, 1, limit=(await services.quotas.of(tenant)).polls):
        outcome = await services.futures.wait(tenant, request, hold_s, key_id)
    if isinstance(outcome, Pending):
        return try_again(request, outcome.queue_state, outcome.reason)
    failpoint("api.before_answer", request)
    if outcome.kind is ResultKind.FAILURE:
        # Log only the category: the message may quote the tenant's data.
        category = outcome.json()["category"]
        log.info("failure_answered", request=request, tenant=tenant, category=category)
    answer = await _answer(services, tenant, outcome, accept)
    await trace_retrieval(services, tenant, request, began, outcome)
    return answer


async def _ended(services: Services, sampler: SamplerRecord, clone: int, after: int, hold_s: float) -> Response:
    quotas = await services.quotas.of(sampler.tenant)
    with services.polls_by_tenant.of(sampler.tenant, 1, limit=quotas.polls):
        completions, cursor = await services.completions.wait(sampler, clone, after, hold_s)
    ended = RetrieveFuturesResponse(completions=[_completion(completion) for completion in completions], cursor=cursor)
    return Response(ended.model_dump_json(exclude_none=True), media_type="application/json")


def _completion(completion: Completion) -> FutureCompletion:
    if completion.failed:
        return FutureCompletion(state="failed", request_id=completion.request)
    return FutureCompletion(
        state="finished", request_id=completion.request, response_payload_uncompressed_size=completion.size
    )


async def _answer(services: Services, tenant: TenantId, result: Result, accept: str) -> Response:
    rewrite = _JSON_OF.get(result.kind)
    if rewrite is None:
        return Response(result.payload, media_type="application/json")
    if PROTOBUF in accept:
        return Response(result.payload, media_type=PROTOBUF)
    payload, weight = result.payload, JSON_VALUE_WEIGHT * len(result.payload) // _NUMBER_BYTES
    json = await services.parser.parse_json(tenant, weight, rewrite, payload)
    return Response(json, media_type="application/json")
