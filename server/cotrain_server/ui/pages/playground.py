"""Playground: send one prompt with one seed to the base model and checkpoints, and compare the answers."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.encoders import jsonable_encoder
from pydantic import ValidationError

from cotrain_server.administration import find_tenant
from cotrain_server.errors import CLIENT_CLOSED_REQUEST, Invalid, first_error
from cotrain_server.http.responses import FiniteJSONResponse
from cotrain_server.http.tenant_routes import ServicesDep
from cotrain_server.services import Services
from cotrain_server.text_apis.answers import Reply, SequenceText, chat_reply, finished
from cotrain_server.text_apis.generation import Generation
from cotrain_server.text_apis.openai_requests import ChatCompletionRequest, CompletionRequest
from cotrain_server.text_apis.openai_responses import completion_reply
from cotrain_server.text_apis.prompts import SCHEME
from cotrain_server.ui.access import form_of
from cotrain_server.ui.page import Page, PageRequest
from cotrain_server.ui.rendering import HEADERS, html, page_router
from cotrain_store.errors import StoreError, StoreUnavailable
from cotrain_store.messages.ids import TenantId
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.catalog import offered_tenants

MAX_MODELS = 4
CHECKPOINTS_OFFERED = 20
MAX_TOKENS = 512
#: Log-prob thresholds of likely, possible and unlikely tokens.
_LEVELS = (-0.1, -1.0, -3.0)

router = page_router()


@partial(Page, "/ui/playground", "Playground", "playground.html")
async def playground(request: PageRequest) -> dict[str, Any]:
    """Return the available models."""
    services, tenant = request.services, request.tenant
    tenants = await offered_tenants(services.connection) if request.visitor.is_operator else {}
    if not tenant:
        return {"tenant": "", "tenants": tenants, "base_models": [], "checkpoints": []}
    await find_tenant(services, tenant)
    pools = [pool for pool in await services.records.served_pools() if pool.max_sequence_tokens]
    page = await services.catalog.checkpoints(
        tenant, 0, CHECKPOINTS_OFFERED, lambda member: "/sampler_weights/" in member
    )
    return {
        "tenant": tenant,
        "tenants": tenants,
        "base_models": [pool.base_model for pool in pools],
        "checkpoints": [
            {name: getattr(found, name) for name in ("path", "name", "run", "base_model")} for found in page.items
        ],
    }


@router.post("/ui/playground", response_model=None)
async def ask(request: Request, services: ServicesDep) -> Response:
    """Sample from each selected model. Return a page with the answers, or JSON if requested."""
    visitor, fields = await form_of(request, services)
    own = visitor.tenant
    tenant = own.id if own else await find_tenant(services, fields.get("tenant", ""))
    models = [fields[name] for name in sorted(fields) if name.startswith("model-")][: MAX_MODELS + 1]
    if not 1 <= len(models) <= MAX_MODELS:
        refusal = f"Tick one to {MAX_MODELS} models."
        return html("answers.html", {"answers": [_refused("No model", refusal)]})
    if own is None:
        await _audit_reads(services, tenant, models)
    answers = await asyncio.gather(*(_answer(request, services, tenant, model, fields) for model in models))
    if any(answer is None for answer in answers):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if "application/json" in request.headers.get("accept", ""):
        return FiniteJSONResponse(jsonable_encoder({"answers": answers}), headers=HEADERS)
    return html("answers.html", {"answers": answers})


async def _audit_reads(services: Services, tenant: TenantId, models: Sequence[str]) -> None:
    """Write the operator's reads of a tenant's weights to the audit log."""
    for model in models:
        if SCHEME in model:
            details = {"tinker_path": model[:2048]}
            async with services.audit.act_of_operator(tenant, AuditEvent.CHECKPOINT_READ, details):
                pass


async def _answer(
    request: Request, services: Services, tenant: TenantId, model: str, fields: Mapping[str, str]
) -> dict[str, Any] | None:
    """Return the answer of one model, or None if the browser has disconnected."""
    try:
        reply = await _reply(services, tenant, model, fields)
        generation = await Generation.start(services, reply.target, reply.bodies)
        complete = await finished(request, generation)
    except StoreError as refused:
        return _refused(model, str(refused))
    except CONNECTION_LOST:
        return _refused(model, str(StoreUnavailable()))
    if complete is None:
        return None
    sequence = complete[0].sequences[0]
    texts = SequenceText(reply).tokens
    parts = texts.with_rest(texts.of_answer(sequence.tokens))
    logprobs: Sequence[float | None] = sequence.logprobs or [None] * len(sequence.tokens)
    return {
        "model": model,
        "error": "",
        "text": "".join(part.text for part in parts),
        "stop_reason": sequence.stop_reason,
        "tokens": [
            {
                "id": token,
                # Show names for tokens without text: control tokens, parts of a character.
                "text": part.text or reply.tokenizer.token_name(token, begins=part.begins),
                "logprob": logprob,
                "level": level_of(logprob),
            }
            for token, part, logprob in zip(sequence.tokens, parts, logprobs, strict=True)
        ],
    }


def _refused(model: str, why: str) -> dict[str, Any]:
    return {"model": model, "error": why, "text": "", "stop_reason": "", "tokens": []}


async def _reply(services: Services, tenant: TenantId, model: str, fields: Mapping[str, str]) -> Reply:
    """Return the reply as the OpenAI endpoints build it: the same seed gives the same answer."""
    prompt, common = fields.get("prompt", ""), _common(model, fields)
    try:
        if fields.get("mode") != "chat":
            text = CompletionRequest.model_validate({**common, "prompt": prompt})
            return await completion_reply(services, tenant, text)
        messages = [{"role": "user", "content": prompt}]
        if system := fields.get("system", "").strip():
            messages.insert(0, {"role": "system", "content": system})
        chat = ChatCompletionRequest.model_validate({**common, "messages": messages})
        return await chat_reply(services, tenant, model, chat.chat(), chat.body, chat.stop_strings)
    except ValidationError as wrong:
        raise Invalid(first_error(wrong)) from None


def _common(model: str, fields: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": _whole_number(fields, "max_tokens", 1, MAX_TOKENS),
        "temperature": _temperature(fields.get("temperature", "")),
        "seed": _whole_number(fields, "seed", 0, 2**31 - 1),
    }


def _whole_number(fields: Mapping[str, str], name: str, least: int, most: int) -> int:
    """Return a field's value. Raises Invalid with its name and limits."""
    text = fields.get(name, "").strip()
    if not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
        raise Invalid(f"{name} must be a whole number from {least} to {most}.")
    return int(text)


def level_of(logprob: float | None) -> int:
    """Return the likelihood class of a token, from 0 (likely) to 3."""
    if logprob is None:
        return 0
    return next((level for level, least in enumerate(_LEVELS) if logprob >= least), len(_LEVELS))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise Invalid("temperature must be a number from 0 to 2.")
    return value
