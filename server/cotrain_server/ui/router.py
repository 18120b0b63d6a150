"""Routes under `/ui`: pages in the order of the navigation, forms of the operator, login and static files.

A form of the operator calls a handler of the admin API, and redirects to its page.
"""

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, ValidationError

from cotrain.wire.admin import KeyRequest, MoveRequest, NewKey, PauseRequest
from cotrain_server.administration import TenantChange
from cotrain_server.errors import Invalid, first_error
from cotrain_server.http.tenant_routes import server_url
from cotrain_server.routes import admin_tenants, admin_workers
from cotrain_server.services import Services
from cotrain_server.ui import access, rendering
from cotrain_server.ui.access import Visitor, check_operator, form_of
from cotrain_server.ui.page import Page, page_context, router_of
from cotrain_server.ui.pages import administration, checkpoints, cycles, overview, playground, run
from cotrain_server.ui.rendering import HEADERS, html, page_router
from cotrain_store.tenants.quotas import Quotas

PAGES: Sequence[Page] = (
    overview.overview,
    cycles.cycles,
    cycles.one_cycle,
    run.runs,
    run.compared,
    run.one_run,
    checkpoints.checkpoints,
    playground.playground,
    administration.usage,
    administration.tenants,
    administration.one_tenant,
    administration.workers,
    administration.audit,
    administration.settings,
)

router = APIRouter(include_in_schema=False)
forms = page_router()


@router.get("/")
async def home() -> RedirectResponse:
    """Redirect from the server's root to its pages."""
    return RedirectResponse("/ui", 303)


_TENANT = "/tenants/{tenant_id}"
_RUN = _TENANT + "/runs/{run_id}"
_WORKER = "/workers/{pool_id}/{worker_id}"


def _form(
    path: str,
    handler: Callable[..., Awaitable[Any]],
    body: type[BaseModel] | None = None,
    *,
    back: str = "",
) -> None:
    """Serve a form, with the handler that applies it, its body there, and the page to redirect to."""

    @forms.post("/ui" + path, response_model=None, name=handler.__name__)
    async def sent(request: Request) -> Response:
        services: Services = request.app.state.services
        visitor, fields = await form_of(request, services)
        check_operator(visitor)
        parts = request.path_params
        given: dict[str, Any] = dict(parts)
        if body is not None:
            given["wanted"] = _body(body, fields)
        made = await handler(services=services, **given)
        if isinstance(made, NewKey):
            return _new_key(visitor, made, server_url(request, services.settings))
        quoted = {name: quote(part, safe="") for name, part in parts.items()}
        return RedirectResponse(f"/ui{back}".format(**quoted), 303, HEADERS)


_form("/tenants", admin_tenants.create, KeyRequest)
_form(_TENANT + "/limits", admin_tenants.change, TenantChange, back=_TENANT)
_form(_TENANT + "/weight", admin_tenants.change, TenantChange, back=_TENANT)
_form(_TENANT + "/pause", admin_tenants.pause, PauseRequest, back=_TENANT)
_form(_TENANT + "/resume", admin_tenants.resume, back=_TENANT)
_form(_TENANT + "/keys", admin_tenants.create_key, KeyRequest)
_form(_TENANT + "/keys/{key_id}/revoke", admin_tenants.revoke, back=_TENANT)
_form(_RUN + "/pause", admin_workers.pause, PauseRequest, back="/runs/{run_id}")
_form(_RUN + "/resume", admin_workers.resume, back="/runs/{run_id}")
_form(_RUN + "/move", admin_workers.move, MoveRequest, back="/runs/{run_id}")
_form(_RUN + "/close", admin_workers.close, back="/runs/{run_id}")
_form(_WORKER + "/drain", admin_workers.drain, back="/workers")
_form(_WORKER + "/undrain", admin_workers.undrain, back="/workers")
_form(_WORKER + "/selfcheck", admin_workers.selfcheck, back="/workers")


def _body(model: type[BaseModel], fields: Mapping[str, str]) -> BaseModel:
    """Return a form's fields as a body of the API. Raises Invalid with the name of the field."""
    given: dict[str, Any] = {
        name: _number(fields[name]) if name in ("days", "weight") else fields[name]
        for name in model.model_fields
        if name in fields
    }
    if model is TenantChange:
        limits = {name: _number(fields[name]) for name in Quotas.model_fields if name in fields}
        given |= {"limits": limits}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise Invalid(first_error(error)) from None


#: Size in bytes with a unit, such as 100 GB.
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(kB|MB|GB|TB)")
_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _number(text: str) -> int | float | str | None:
    """Return a number, which may be a size with a unit.

    None for an empty field, or other text unchanged for later validation.
    """
    text = text.strip()
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return int(text)
    if found := _SIZE.fullmatch(text):
        return round(float(found[1]) * _BYTES[found[2]])
    try:
        return float(text) if text else None
    except ValueError:
        return text


def _new_key(visitor: Visitor, made: NewKey, address: str) -> Response:
    context = page_context(administration.one_tenant, PAGES, visitor, time.time())
    return html("new_key.html", context | {"made": made, "address": address, "layout": "layout.html"})


# Last, because the routes of a router are copied.
for more in (
    rendering.router, access.router, run.router, checkpoints.router, playground.router, forms, router_of(PAGES),
):  # fmt: skip
    router.include_router(more)
