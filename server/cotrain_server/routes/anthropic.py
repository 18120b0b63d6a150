"""Anthropic-compatible endpoints, for clients with `base_url=".../anthropic/api"`."""

import secrets
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from typing_extensions import override

from cotrain_server.http.responses import FiniteJSONResponse
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, api_key, body_of
from cotrain_server.requests.samples import is_sampleable
from cotrain_server.text_apis.anthropic_requests import AnthropicError, CountRequest, MessageRequest, anthropic_error
from cotrain_server.text_apis.anthropic_responses import MessageReply, answer, stream
from cotrain_server.text_apis.prompts import accepted_chat, count_prompt_tokens, find_model, find_target, find_weights
from cotrain_server.text_apis.route import STREAMS, InferenceRoute, Refusal, generate, read_request, responses


class AnthropicRoute(InferenceRoute):
    """A route with Anthropic's error format."""

    base_url = "/anthropic/api"

    @staticmethod
    @override
    def error_body(refusal: Refusal, request_id: str) -> AnthropicError:
        """Return an error in Anthropic's format."""
        return anthropic_error(refusal, request_id)


router = APIRouter(
    prefix="/anthropic/api/v1",
    tags=["anthropic"],
    route_class=AnthropicRoute,
    dependencies=[api_key],
    responses=responses(AnthropicError),
)


@router.get("/models", response_model=None)
async def list_models(services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """List the base models that can be sampled. A tenant's own weights are addressed by their paths."""
    names = [pool.base_model for pool in await services.records.served_pools() if is_sampleable(pool)]
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    return {"data": [_listed(name) for name in names], "has_more": False, **ends}


def _listed(name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",  # "if the release date is unknown"
        "lifecycle": "active",
    }


@router.get("/models/{model:path}", response_model=None)
async def get_model(model: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """Return a base model, or weights of the tenant by their path."""
    await find_weights(services, tenant.id, model)
    return _listed(model)


@router.post("/messages/count_tokens", response_model=None, openapi_extra=body_of(CountRequest))
async def count_tokens(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Count the prompt tokens of a chat."""
    wanted = await read_request(request, services, tenant.id, CountRequest)
    wanted.check()
    model = await find_model(services, tenant.id, wanted.model)
    return FiniteJSONResponse({"input_tokens": await count_prompt_tokens(services, tenant.id, model, wanted.chat())})


@router.post("/messages", response_model=None, responses=STREAMS, openapi_extra=body_of(MessageRequest))
async def write_message(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Write the next message of a chat, or the rest of the last message if it is the model's own."""
    wanted = await read_request(request, services, tenant.id, MessageRequest)
    wanted.check()
    target = await find_target(services, tenant.id, wanted.model)
    body, format = await accepted_chat(services, target, wanted.chat(), wanted.body)
    reply = MessageReply(
        id=secrets.token_hex(12),
        request_id=request.state.request_id,
        model=wanted.model,
        target=target,
        body=body,
        stop=tuple(wanted.stop_sequences or ()),
        begins=not wanted.is_prefilled,
        format=format,
    )
    whole, streamed = partial(answer, reply), partial(stream, reply)
    return await generate(request, services, target, [body], wanted.stream, whole, streamed)
