"""OpenAI-compatible endpoints, for clients with `base_url=".../oai/api/v1"`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from cotrain_server.http.request_body import body_weight
from cotrain_server.http.responses import FiniteJSONResponse
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, api_key, body_of
from cotrain_server.requests.samples import is_sampleable
from cotrain_server.text_apis.answers import chat_reply, generate
from cotrain_server.text_apis.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIError,
    openai_error,
)
from cotrain_server.text_apis.openai_responses import ChatShape, CompletionAnswer, CompletionShape, completion_reply
from cotrain_server.text_apis.prompts import count_prompt_tokens, find_weights
from cotrain_server.text_apis.responses_api import ResponseAnswer, ResponseRequest
from cotrain_server.text_apis.route import STREAMS, InferenceRoute, read_request, responses


class OpenAIRoute(InferenceRoute):
    """A route with OpenAI's error format."""

    base_url = "/oai/api/v1"
    error_body = staticmethod(openai_error)


router = APIRouter(
    prefix=OpenAIRoute.base_url,
    tags=["openai"],
    route_class=OpenAIRoute,
    dependencies=[api_key],
    responses=responses(OpenAIError),
)


@router.get("/models", response_model=None)
async def list_models(services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """List the base models that can be sampled. A tenant's own weights are addressed by their paths."""
    pools = [pool for pool in await services.records.served_pools() if is_sampleable(pool)]
    return {"object": "list", "data": [_listed(pool.base_model) for pool in pools]}


@router.get("/models/{model:path}", response_model=None)
async def get_model(model: str, services: ServicesDep, tenant: TenantDep) -> dict[str, Any]:
    """Return a base model, or weights of the tenant by their path."""
    await find_weights(services, tenant.id, model)
    return _listed(model)


def _listed(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "cotrain"}


@router.post("/completions", response_model=None, responses=STREAMS, openapi_extra=body_of(CompletionRequest))
async def continue_texts(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Continue one or more texts."""
    wanted = await read_request(request, services, tenant.id, CompletionRequest)
    reply = await completion_reply(services, tenant.id, wanted, body_weight(request))
    answer = CompletionAnswer(wanted, reply, CompletionShape(), wants_logprobs=wanted.logprobs is not None)
    return await generate(request, services, reply, answer, wanted.stream)


@router.post("/chat/completions", response_model=None, responses=STREAMS, openapi_extra=body_of(ChatCompletionRequest))
async def chat(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Write the next message of a chat."""
    wanted = await read_request(request, services, tenant.id, ChatCompletionRequest)
    reply = await chat_reply(services, tenant.id, wanted.model, wanted.chat(), wanted.body, wanted.stop_strings)
    answer = CompletionAnswer(wanted, reply, ChatShape(), wants_logprobs=bool(wanted.logprobs))
    return await generate(request, services, reply, answer, wanted.stream)


@router.post("/responses", response_model=None, responses=STREAMS, openapi_extra=body_of(ResponseRequest))
async def respond(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Write the next message of a chat, in the format of the Responses API. Nothing is stored."""
    wanted = await read_request(request, services, tenant.id, ResponseRequest)
    reply = await chat_reply(services, tenant.id, wanted.model, wanted.chat(), wanted.body, wanted.stop_strings)
    return await generate(request, services, reply, ResponseAnswer(wanted, reply), wanted.stream)


@router.post("/responses/input_tokens", response_model=None, openapi_extra=body_of(ResponseRequest))
async def count_tokens(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Count the prompt tokens of a response's input."""
    wanted = await read_request(request, services, tenant.id, ResponseRequest)
    tokens = await count_prompt_tokens(services, tenant.id, wanted.model, wanted.chat())
    return FiniteJSONResponse({"object": "response.input_tokens", "input_tokens": tokens})
