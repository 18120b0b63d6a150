"""retrieve_future and retrieve_futures: hold a poll until a result is there, or long enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cotrain.codec import PROTOBUF, pass_output_to_json
from cotrain.sample_codec import sample_response_to_json
from cotrain.types import (
    CancelFutureRequest,
    FutureCompletion,
    FutureRetrieveRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    TryAgainResponse,
)
from cotrain_server.bodies import away_from_the_loop
from cotrain_server.deps import ServicesDep, TenantDep, api_key
from cotrain_server.errors import CLIENT_CLOSED_REQUEST
from cotrain_server.gate import PollRoute, try_again
from cotrain_server.hangup import while_connected
from cotrain_store.failpoints import failpoint
from cotrain_store.futures import Pending
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.results import ResultKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cotrain_store.completions import Completion
    from cotrain_store.messages.results import Result

router = APIRouter(
    prefix="/api/v1", tags=["futures"], route_class=PollRoute, dependencies=[api_key]
)

_JSON_OF: Mapping[ResultKind, Callable[[bytes], bytes]] = {
    ResultKind.PASS: pass_output_to_json,
    ResultKind.SAMPLE: sample_response_to_json,
}
"""Results that are messages: SDK 0.38 takes them as they are, 0.22 may ask for JSON."""


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
) -> Response:
    """Answer with the result, or after a while with 408. A result can be fetched more than once."""
    name, hold_s = RequestId(poll.request_id), services.settings.long_poll_s
    with services.held_poll(tenant.id):
        outcome = await while_connected(request, services.futures.wait(tenant.id, name, hold_s))
    if outcome is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(outcome, Pending):
        return try_again(poll.request_id, outcome.queue_state, outcome.reason)
    failpoint("api.before_answer", poll.request_id)
    return await _answer(outcome, accept=request.headers.get("accept", ""))


@router.post(
    "/retrieve_futures",
    response_model=RetrieveFuturesResponse,
    response_model_exclude_none=True,
    responses={408: {"model": TryAgainResponse, "description": "Not now: ask again."}},
)
async def retrieve_futures(
    poll: RetrieveFuturesRequest, request: Request, services: ServicesDep, tenant: TenantDep
) -> RetrieveFuturesResponse | Response:
    """Say which requests of a sampler have ended since `prev_cursor`: one poll waits for all."""
    target, longest_s = poll.target, services.settings.long_poll_s
    hold_s = longest_s if poll.timeout is None else min(poll.timeout, longest_s)
    sampler = await services.records.sampler(tenant.id, target.sampling_session_id)
    await services.completions.acknowledge(sampler, poll.retrieved_request_ids)
    with services.held_poll(tenant.id):
        ended = await while_connected(
            request,
            services.completions.wait(sampler, target.cloned_sampler_id, poll.prev_cursor, hold_s),
        )
    if ended is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    completions, cursor = ended
    return RetrieveFuturesResponse(
        completions=[_completion(completion) for completion in completions], cursor=cursor
    )


@router.post("/cancel_future", status_code=204)
async def cancel_future(
    cancellation: CancelFutureRequest, services: ServicesDep, tenant: TenantDep
) -> None:
    """End a sample request that nobody waits for any more; an unknown one is left alone."""
    await services.sample_intake.cancel(tenant.id, RequestId(cancellation.request_id))


def _completion(completion: Completion) -> FutureCompletion:
    if completion.failed:
        return FutureCompletion(state="failed", request_id=completion.request)
    return FutureCompletion(
        state="finished",
        request_id=completion.request,
        response_payload_uncompressed_size=completion.size,
    )


async def _answer(result: Result, accept: str) -> Response:
    rewrite = _JSON_OF.get(result.kind)
    if rewrite is None:
        return Response(result.payload, media_type="application/json")
    if PROTOBUF in accept:
        return Response(result.payload, media_type=PROTOBUF)
    payload = result.payload
    json = await away_from_the_loop(len(payload), rewrite, payload)
    return Response(json, media_type="application/json")
