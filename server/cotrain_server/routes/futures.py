"""retrieve_future: hold a poll until its result is there, or long enough."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cotrain.codec import PROTOBUF, pass_output_to_json
from cotrain.types import FutureRetrieveRequest, TryAgainResponse
from cotrain_server.bodies import away_from_the_loop
from cotrain_server.deps import ServicesDep, TenantDep, api_key
from cotrain_server.errors import CLIENT_CLOSED_REQUEST
from cotrain_server.gate import PollRoute, try_again
from cotrain_store.futures import Pending
from cotrain_store.messages import RequestId, Result, ResultKind

if TYPE_CHECKING:
    from cotrain_server.services import Services
    from cotrain_store.messages import Tenant

router = APIRouter(
    prefix="/api/v1", tags=["futures"], route_class=PollRoute, dependencies=[api_key]
)


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
    with services.held_poll(tenant.id):
        outcome = await _outcome(poll, request, services, tenant)
    if outcome is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(outcome, Pending):
        return try_again(poll.request_id, outcome.queue_state, outcome.reason)
    return await _answer(outcome, accept=request.headers.get("accept", ""))


async def _outcome(
    poll: FutureRetrieveRequest, request: Request, services: Services, tenant: Tenant
) -> Result | Pending | None:
    """Wait for a result as long as its client does; None when that has gone."""
    waiting = asyncio.ensure_future(
        services.futures.wait(tenant.id, RequestId(poll.request_id), services.settings.long_poll_s)
    )
    hung_up = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({waiting, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        hung_up.cancel()
        await asyncio.wait({waiting, hung_up})


async def _hung_up(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer(result: Result, accept: str) -> Response:
    if result.kind is not ResultKind.PASS:
        return Response(result.payload, media_type="application/json")
    if PROTOBUF in accept:
        return Response(result.payload, media_type=PROTOBUF)
    payload = result.payload
    json = await away_from_the_loop(len(payload), pass_output_to_json, payload)
    return Response(json, media_type="application/json")
