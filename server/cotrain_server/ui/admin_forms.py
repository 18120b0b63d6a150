"""Forms of the operator. Each is validated like the API's body, applied, and redirects to its page."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ValidationError

from cotrain.wire.admin import KeyRequest, MoveRequest, PauseRequest
from cotrain_server.administration.tenant_grants import (
    TenantChange,
    change_tenant,
    find_tenant,
    make_key,
    pause_tenant,
    resume_tenant,
    revoke_key,
)
from cotrain_server.administration.workers import (
    close_run,
    drain_worker,
    move_run,
    pause_run,
    resume_run,
    take_worker_back,
)
from cotrain_server.errors import Invalid, sentence
from cotrain_server.services import Services
from cotrain_server.settings import Quotas
from cotrain_server.ui.access.session import Visitor, check_operator, form_of
from cotrain_server.ui.navigation import PAGES
from cotrain_server.ui.page import page_context
from cotrain_server.ui.pages import tenants as tenant_page
from cotrain_server.ui.rendering import HEADERS, guarded, html
from cotrain_store.messages.ids import TenantId

_Act = Callable[["_Form"], Awaitable[Response | None]]

_Asked = TypeVar("_Asked", bound=BaseModel)

router = APIRouter(prefix="/ui", include_in_schema=False)

_TENANT = "/tenants/{tenant_id}"
_RUN = _TENANT + "/runs/{run_id}"
_WORKER = "/workers/{pool_id}/{worker_id}"


@dataclass(frozen=True)
class _Form:
    """A parsed and authorized form of the operator."""

    services: Services
    visitor: Visitor
    fields: Mapping[str, str]
    parts: Mapping[str, str]
    """Path parameter, such as a run's id."""
    tenant: TenantId
    """Existing tenant in the path; empty without one."""

    def read(self, asked: type[_Asked], fields: Mapping[str, Any]) -> _Asked:
        """Return fields validated by the API's model. Raises Invalid with the name of the field."""
        try:
            return asked.model_validate(fields)
        except ValidationError as error:
            raise Invalid(sentence(error.errors())) from None

    def field(self, name: str, default: str = "") -> str:
        """Return a field as text."""
        return self.fields.get(name, default)


def _form(path: str, back: str = "") -> Callable[[_Act], _Act]:
    """Return a route that authorizes a form, looks up its tenant, applies it, and redirects unless
    it returns an answer.
    """

    def served(act: _Act) -> _Act:
        @router.post(path, response_model=None, name=act.__name__)
        @guarded
        async def sent(request: Request) -> Response:
            services: Services = request.app.state.services
            visitor, fields = await form_of(request, services)
            check_operator(visitor)
            parts = request.path_params
            asked_for = parts.get("tenant_id")
            tenant = await find_tenant(services, asked_for) if asked_for else TenantId("")
            answer = await act(_Form(services, visitor, fields, parts, tenant))
            quoted = {name: quote(part, safe="") for name, part in parts.items()}
            return answer or RedirectResponse(f"/ui{back}".format(**quoted), 303, HEADERS)

        return act

    return served


@_form("/tenants")
async def create_tenant(form: _Form) -> Response:
    """Create a tenant, and show its first key."""
    made = await make_key(form.services, None, form.read(KeyRequest, {"name": form.field("name")}))
    return _new_key(form.visitor, made.tenant, made.key)


@_form(_TENANT + "/limits", back=_TENANT)
async def set_limits(form: _Form) -> None:
    """Set the limits of a tenant. An empty field restores the default."""
    limits = {
        name: _number(form.field(name)) for name in Quotas.model_fields if name in form.fields
    }
    await change_tenant(form.services, form.tenant, form.read(TenantChange, {"limits": limits}))


@_form(_TENANT + "/weight", back=_TENANT)
async def set_weight(form: _Form) -> None:
    """Set a tenant's weight."""
    change = form.read(TenantChange, {"weight": _decimal(form.field("weight"))})
    await change_tenant(form.services, form.tenant, change)


@_form(_TENANT + "/pause", back=_TENANT)
async def pause(form: _Form) -> None:
    """Pause a tenant."""
    asked = form.read(PauseRequest, {"reason": form.field("reason")})
    await pause_tenant(form.services, form.tenant, asked.reason)


@_form(_TENANT + "/resume", back=_TENANT)
async def resume(form: _Form) -> None:
    """Resume a tenant."""
    await resume_tenant(form.services, form.tenant)


@_form(_TENANT + "/keys")
async def create_key(form: _Form) -> Response:
    """Create a key, and show it once."""
    wanted = {
        "name": form.field("name"),
        "role": form.field("role", "member"),
        "days": _decimal(form.field("days")),
    }
    made = await make_key(form.services, form.tenant, form.read(KeyRequest, wanted))
    return _new_key(form.visitor, form.tenant, made.key)


@_form(_TENANT + "/keys/{key_id}/revoke", back=_TENANT)
async def revoke(form: _Form) -> None:
    """Revoke a key."""
    await revoke_key(form.services, form.tenant, form.parts["key_id"])


@_form(_RUN + "/pause", back="/runs/{run_id}")
async def pause_one(form: _Form) -> None:
    """Pause a run."""
    asked = form.read(PauseRequest, {"reason": form.field("reason")})
    await pause_run(form.services, form.tenant, form.parts["run_id"], asked.reason)


@_form(_RUN + "/resume", back="/runs/{run_id}")
async def resume_one(form: _Form) -> None:
    """Resume a run."""
    await resume_run(form.services, form.tenant, form.parts["run_id"])


@_form(_RUN + "/move", back="/runs/{run_id}")
async def move_one(form: _Form) -> None:
    """Move a run to another worker."""
    wanted = form.read(MoveRequest, {"worker": form.field("worker")})
    await move_run(form.services, form.tenant, form.parts["run_id"], wanted.worker)


@_form(_RUN + "/close", back="/runs/{run_id}")
async def close_one(form: _Form) -> None:
    """Close a run."""
    await close_run(form.services, form.tenant, form.parts["run_id"])


@_form(_WORKER + "/drain", back="/workers")
async def drain(form: _Form) -> None:
    """Move a worker's runs to the others of its pool."""
    await drain_worker(form.services, form.parts["pool_id"], form.parts["worker_id"])


@_form(_WORKER + "/move", back="/workers")
async def move_from(form: _Form) -> None:
    """Move a run of this worker to another one."""
    tenant = await find_tenant(form.services, form.field("tenant"))
    wanted = form.read(MoveRequest, {"worker": form.field("worker")})
    await move_run(form.services, tenant, form.field("run"), wanted.worker)


@_form(_WORKER + "/undrain", back="/workers")
async def undrain(form: _Form) -> None:
    """Put a drained worker back into service."""
    await take_worker_back(form.services, form.parts["pool_id"], form.parts["worker_id"])


def _number(text: str) -> int | str | None:
    """Return a whole number, None for an empty field, or other text unchanged for later validation."""
    text = text.strip()
    is_number = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if is_number else text or None


def _decimal(text: str) -> float | str | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        return text


def _new_key(visitor: Visitor, tenant: str, key: str) -> Response:
    context = page_context(tenant_page.TENANT_PAGE, PAGES, visitor, time.time())
    shown = {"tenant_id": tenant, "key": key, "layout": "layout.html"}
    return html("new_key.html", context | shown)
