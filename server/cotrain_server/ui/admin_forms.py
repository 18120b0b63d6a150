"""What the operator sends from pages: each form is checked as the API checks it, done, and leads back to its page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ValidationError

from cotrain.wire.admin import KeyRequest, PauseRequest
from cotrain_server.administration.runs import close_run, resume_run
from cotrain_server.administration.tenant_grants import (
    TenantChange,
    change_tenant,
    find_tenant,
    pause_tenant,
    resume_tenant,
)
from cotrain_server.administration.tenant_keys import make_key, revoke_key
from cotrain_server.administration.workers import drain_worker, take_worker_back
from cotrain_server.errors import Invalid, sentence
from cotrain_server.settings import Quotas
from cotrain_server.ui.access.visitors import check_operator, form_of
from cotrain_server.ui.navigation import PAGES
from cotrain_server.ui.page import page_context
from cotrain_server.ui.pages import tenant as tenant_page
from cotrain_server.ui.rendering import HEADERS, guarded, html

if TYPE_CHECKING:
    from typing import Any

    from cotrain_server.services import Services
    from cotrain_server.ui.access.session import Visitor

_Asked = TypeVar("_Asked", bound=BaseModel)

router = APIRouter(prefix="/ui", include_in_schema=False)


@router.post("/tenants", response_model=None)
@guarded
async def create_tenant(request: Request) -> Response:
    """Make a tenant, and show its first key."""
    services, visitor, fields = await _form(request)
    made = await make_key(services, None, _read(KeyRequest, {"name": fields.get("name", "")}))
    return _new_key(visitor, made.tenant, made.key)


@router.post("/tenants/{tenant_id}/limits", response_model=None)
@guarded
async def set_limits(request: Request, tenant_id: str) -> Response:
    """Set the limits of a tenant; an empty field takes one back to its default."""
    services, _, fields = await _form(request)
    limits = {name: _number(fields[name]) for name in Quotas.model_fields if name in fields}
    tenant = await find_tenant(services, tenant_id)
    await change_tenant(services, tenant, _read(TenantChange, {"limits": limits}))
    return _back(tenant)


@router.post("/tenants/{tenant_id}/weight", response_model=None)
@guarded
async def set_weight(request: Request, tenant_id: str) -> Response:
    """Set a tenant's weight."""
    services, _, fields = await _form(request)
    tenant = await find_tenant(services, tenant_id)
    change = _read(TenantChange, {"weight": _decimal(fields.get("weight", ""))})
    await change_tenant(services, tenant, change)
    return _back(tenant)


@router.post("/tenants/{tenant_id}/pause", response_model=None)
@guarded
async def pause(request: Request, tenant_id: str) -> Response:
    """Hold a tenant back."""
    services, _, fields = await _form(request)
    tenant = await find_tenant(services, tenant_id)
    asked = _read(PauseRequest, {"reason": fields.get("reason", "")})
    await pause_tenant(services, tenant, asked.reason)
    return _back(tenant)


@router.post("/tenants/{tenant_id}/resume", response_model=None)
@guarded
async def resume(request: Request, tenant_id: str) -> Response:
    """Let a tenant go on."""
    services, _, _ = await _form(request)
    tenant = await find_tenant(services, tenant_id)
    await resume_tenant(services, tenant)
    return _back(tenant)


@router.post("/tenants/{tenant_id}/keys", response_model=None)
@guarded
async def create_key(request: Request, tenant_id: str) -> Response:
    """Make a key, and show it once."""
    services, visitor, fields = await _form(request)
    tenant = await find_tenant(services, tenant_id)
    wanted = {
        "name": fields.get("name", ""),
        "role": fields.get("role", "member"),
        "days": _decimal(fields.get("days", "")),
    }
    made = await make_key(services, tenant, _read(KeyRequest, wanted))
    return _new_key(visitor, tenant, made.key)


@router.post("/tenants/{tenant_id}/keys/{key_id}/revoke", response_model=None)
@guarded
async def revoke(request: Request, tenant_id: str, key_id: str) -> Response:
    """End a key."""
    services, _, _ = await _form(request)
    tenant = await find_tenant(services, tenant_id)
    await revoke_key(services, tenant, key_id)
    return _back(tenant)


@router.post("/tenants/{tenant_id}/runs/{run_id}/{act}", response_model=None)
@guarded
async def change_run(request: Request, tenant_id: str, run_id: str, act: str) -> Response:
    """Let a run of a tenant go on, or end it."""
    services, _, _ = await _form(request)
    tenant = await find_tenant(services, tenant_id)
    if act == "resume":
        await resume_run(services, tenant, run_id)
    elif act == "close":
        await close_run(services, tenant, run_id)
    else:
        raise Invalid("A run can be resumed or closed here.")
    return _back(tenant)


@router.post("/workers/{pool_id}/{worker_id}/drain", response_model=None)
@guarded
async def drain(request: Request, pool_id: str, worker_id: str) -> Response:
    """Have a worker's runs go to the others of its pool."""
    services, _, _ = await _form(request)
    await drain_worker(services, pool_id, worker_id)
    return RedirectResponse("/ui/workers", 303, HEADERS)


@router.post("/workers/{pool_id}/{worker_id}/undrain", response_model=None)
@guarded
async def undrain(request: Request, pool_id: str, worker_id: str) -> Response:
    """Let a worker take runs again."""
    services, _, _ = await _form(request)
    await take_worker_back(services, pool_id, worker_id)
    return RedirectResponse("/ui/workers", 303, HEADERS)


async def _form(request: Request) -> tuple[Services, Visitor, dict[str, str]]:
    services: Services = request.app.state.services
    visitor, fields = await form_of(request, services)
    check_operator(visitor)
    return services, visitor, fields


def _read(asked: type[_Asked], fields: dict[str, Any]) -> _Asked:
    try:
        return asked.model_validate(fields)
    except ValidationError as error:
        raise Invalid(sentence(error.errors())) from None


def _number(text: str) -> int | str | None:
    """Read a whole number, None where the field is empty; any other text is refused where it is checked."""
    text = text.strip()
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if is_number else text or None


def _decimal(text: str) -> float | str | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        return text


def _back(tenant: str) -> RedirectResponse:
    return RedirectResponse(f"/ui/tenants/{quote(tenant, safe='')}", 303, HEADERS)


def _new_key(visitor: Visitor, tenant: str, key: str) -> Response:
    context = page_context(tenant_page.PAGE, PAGES, visitor, time.time())
    shown = {"tenant_id": tenant, "key": key, "layout": "layout.html"}
    return html("new_key.html", context | shown)
