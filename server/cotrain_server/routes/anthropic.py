"""Anthropic-compatible endpoints, for clients with `base_url=".../anthropic/api"`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from cotrain_server.http.responses import FiniteJSONResponse
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, api_key, body_of
from cotrain_server.requests.samples import is_sampleable
from cotrain_server.text_apis.answers import chat_reply, generate
from cotrain_server.text_apis.anthropic_requests import AnthropicError, CountRequest, MessageRequest, anthropic_error
from cotrain_server.text_apis.anthropic_responses import MessageAnswer
from cotrain_server.text_apis.prompts import count_prompt_tokens, find_weights
from cotrain_server.text_apis.route import STREAMS, InferenceRoute, read_request, responses


class AnthropicRoute(InferenceRoute):
    """A route with Anthropic's error format."""

    base_url = "/anthropic/api"
    error_body = staticmethod(anthropic_error)


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
    tokens = await count_prompt_tokens(services, tenant.id, wanted.model, wanted.chat())
    return FiniteJSONResponse({"input_tokens": tokens})


@router.post("/messages", response_model=None, responses=STREAMS, openapi_extra=body_of(MessageRequest))
async def write_message(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Write the next message of a chat, or the rest of the last message if it is the model's own."""
    wanted = await read_request(request, services, tenant.id, MessageRequest)
    reply = await chat_reply(services, tenant.id, wanted.model, wanted.chat(), wanted.body, wanted.stop_strings)
    answer = MessageAnswer(reply, request.state.request_id)
    return await generate(request, services, reply, answer, wanted.stream)
