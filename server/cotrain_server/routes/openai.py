"""OpenAI-compatible endpoints, for clients with `base_url=".../oai/api/v1"`."""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from typing_extensions import override

from cotrain_server.http.request_body import body_weight
from cotrain_server.http.responses import FiniteJSONResponse
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, api_key, body_of
from cotrain_server.requests.samples import is_sampleable
from cotrain_server.services import Services
from cotrain_server.text_apis import responses_api
from cotrain_server.text_apis.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    OpenAIError,
    openai_error,
)
from cotrain_server.text_apis.openai_responses import ChatShape, CompletionShape, Reply, answer, chunks
from cotrain_server.text_apis.prompts import (
    Target,
    accepted_chat,
    count_prompt_tokens,
    find_model,
    find_target,
    find_weights,
    prompt_bodies,
    text_weight,
    written_characters,
)
from cotrain_server.text_apis.route import STREAMS, InferenceRoute, Refusal, generate, read_request, responses
from cotrain_store.bodies.sample_body import SampleBody
from cotrain_store.messages.runs import Tenant

ChatRequest = ChatCompletionRequest | responses_api.ResponseRequest


class OpenAIRoute(InferenceRoute):
    """A route with OpenAI's error format."""

    base_url = "/oai/api/v1"

    @staticmethod
    @override
    def error_body(refusal: Refusal, request_id: str) -> OpenAIError:
        """Return an error in OpenAI's format."""
        return openai_error(refusal)


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
    wanted.check()
    target = await find_target(services, tenant.id, wanted.model)
    prompts = wanted.prompts
    weight = body_weight(request) + text_weight(written_characters(prompts))
    make = partial(
        prompt_bodies,
        target,
        prompts,
        wanted.body,
        echo=bool(wanted.echo),
        special=wanted.add_special_tokens is not False,
    )
    bodies, echoes = await services.parser.run(tenant.id, weight, make)
    wants_logprobs = wanted.logprobs is not None
    reply = _reply(wanted, target, bodies, shape=CompletionShape(), wants_logprobs=wants_logprobs, echoes=echoes)
    return await _generate(request, services, reply, wanted)


@router.post("/chat/completions", response_model=None, responses=STREAMS, openapi_extra=body_of(ChatCompletionRequest))
async def chat(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Write the next message of a chat."""
    wanted = await read_request(request, services, tenant.id, ChatCompletionRequest)
    reply = await _chat_reply(services, tenant, wanted, wants_logprobs=bool(wanted.logprobs))
    return await _generate(request, services, reply, wanted)


@router.post("/responses", response_model=None, responses=STREAMS, openapi_extra=body_of(responses_api.ResponseRequest))
async def respond(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Write the next message of a chat, in the format of the Responses API. Nothing is stored."""
    wanted = await read_request(request, services, tenant.id, responses_api.ResponseRequest)
    reply = await _chat_reply(services, tenant, wanted, wants_logprobs=wanted.wants_logprobs)
    whole, streamed = partial(responses_api.answer, wanted, reply), partial(responses_api.stream, wanted, reply)
    return await generate(request, services, reply.target, reply.bodies, wanted.stream, whole, streamed)


@router.post("/responses/input_tokens", response_model=None, openapi_extra=body_of(responses_api.ResponseRequest))
async def count_tokens(request: Request, services: ServicesDep, tenant: TenantDep) -> Response:
    """Count the prompt tokens of a response's input."""
    wanted = await read_request(request, services, tenant.id, responses_api.ResponseRequest)
    wanted.check()
    model = await find_model(services, tenant.id, wanted.model)
    tokens = await count_prompt_tokens(services, tenant.id, model, wanted.chat())
    return FiniteJSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


async def _chat_reply(services: Services, tenant: Tenant, wanted: ChatRequest, *, wants_logprobs: bool) -> Reply:
    wanted.check()
    target = await find_target(services, tenant.id, wanted.model)
    body, format = await accepted_chat(services, target, wanted.chat(), wanted.body)
    return _reply(wanted, target, [body], shape=ChatShape(), format=format, wants_logprobs=wants_logprobs)


def _reply(wanted: GenerationRequest, target: Target, bodies: Sequence[SampleBody], **rest: Any) -> Reply:
    return Reply(
        id=secrets.token_hex(12),
        created=int(time.time()),
        model=wanted.model,
        target=target,
        bodies=bodies,
        stop=wanted.stop_strings,
        wants_usage=wanted.wants_usage,
        **rest,
    )


async def _generate(request: Request, services: Services, reply: Reply, wanted: GenerationRequest) -> Response:
    whole, streamed = partial(answer, reply), partial(chunks, reply)
    return await generate(request, services, reply.target, reply.bodies, wanted.stream, whole, streamed)
