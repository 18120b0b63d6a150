"""A page: its address, its JSON twin, and the creation of both from the same data."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import RedirectResponse
from starlette.datastructures import QueryParams

from cotrain_server.errors import Invalid, NotLoggedIn
from cotrain_server.http.responses import FiniteJSONResponse
from cotrain_server.http.tenant_routes import server_url
from cotrain_server.services import Services
from cotrain_server.ui.access import LOGIN, Visitor, check_operator, visitor_of
from cotrain_server.ui.rendering import HEADERS, PageRoute, html
from cotrain_server.views.server_status import FLEET_TIMEOUT_S
from cotrain_store.errors import StoreUnavailable
from cotrain_store.messages.ids import TenantId


@dataclass(frozen=True)
class PageRequest:
    """One request for a page: visitor, query and time."""

    services: Services
    visitor: Visitor
    query: QueryParams
    parts: Mapping[str, str]  # path parameters, such as a run's id
    now: float
    address: str  # base URL of the server, without a trailing slash

    @property
    def tenant(self) -> TenantId:
        """Tenant whose data is shown: the visitor, or the operator's choice; empty without a choice."""
        own = self.visitor.tenant
        return own.id if own else TenantId(self.query.get("tenant", "")[:200])

    @property
    def offset(self) -> int:
        """Number of rows to skip. Raises Invalid."""
        text = self.query.get("offset", "0")
        if not (text.isascii() and text.isdecimal()) or len(text) > 9:
            raise Invalid("offset must be a whole number of at least 0.")
        return int(text)


@dataclass(frozen=True)
class Page:
    """A page under `/ui`. `partial(Page, …)` decorates the function that reads its data."""

    path: str  # Route path: `/ui/runs/{run_id}`. The suffix `.json` gives the twin.
    name: str  # name in the navigation and the title
    template: str
    read: Callable[[PageRequest], Awaitable[dict[str, Any]]]
    """Returns the page's data for the template and the twin. A tenant's data contains nothing of other tenants."""
    poll_s: int = 0  # interval in seconds at which the browser updates the changing part; 0: never
    for_operator: bool = False  # True for the operator only. For a tenant the page does not exist.
    for_tenant: bool = False
    """True to hide it from the operator's navigation, where every tenant has a page."""
    in_navigation: bool = True

    @property
    def twin(self) -> str:
        """Path of its data as JSON."""
        return f"{self.path}/overview.json" if self.path == "/ui" else f"{self.path}.json"


def router_of(pages: Sequence[Page]) -> APIRouter:
    """Return the routes of pages and their twins. Twins come first, because a page with an id would match their path."""
    router = APIRouter(include_in_schema=False)
    for page in pages:
        router.add_api_route(page.twin, _twin_route(page), response_model=None)
    for page in pages:
        router.add_api_route(page.path, _html_route(page, pages), response_model=None, route_class_override=PageRoute)
    return router


def _shown_to(visitor: Visitor, pages: Sequence[Page]) -> list[Page]:
    """Return the pages in a visitor's navigation."""
    return [
        page
        for page in pages
        if page.in_navigation and not (page.for_tenant if visitor.is_operator else page.for_operator)
    ]


def page_context(page: Page, pages: Sequence[Page], visitor: Visitor, now: float) -> dict[str, Any]:
    """Return the template variables that every page needs next to its data."""
    return {"page": page, "pages": _shown_to(visitor, pages), "visitor": visitor, "now": now}


def _twin_route(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def twin(request: Request) -> Response:
        _, data = await _read(request, page)
        return FiniteJSONResponse(jsonable_encoder(data), headers=HEADERS)

    return twin


def _html_route(page: Page, pages: Sequence[Page]) -> Callable[[Request], Awaitable[Response]]:
    async def shown(request: Request) -> Response:
        is_part = request.headers.get("hx-request") == "true"
        try:
            page_request, data = await _read(request, page)
        except NotLoggedIn:
            return _to_login(request, is_part=is_part)
        context = page_context(page, pages, page_request.visitor, page_request.now)
        layout = "part.html" if is_part else "layout.html"
        return html(page.template, context | data | {"layout": layout})

    return shown


async def _page_request(request: Request, page: Page) -> PageRequest:
    services: Services = request.app.state.services
    visitor = await visitor_of(request, services)
    if page.for_operator:
        check_operator(visitor)
    address = server_url(request, services.settings)
    return PageRequest(services, visitor, request.query_params, request.path_params, time.time(), address)


async def _read(request: Request, page: Page) -> tuple[PageRequest, dict[str, Any]]:
    """Return a request for a page with its visitor, and the page's data.

    Raises:
        StoreUnavailable: Redis takes too long.
        NotLoggedIn, Refused: as for `visitor_of`, and OPERATORS_ONLY.
    """
    try:
        async with asyncio.timeout(FLEET_TIMEOUT_S):
            page_request = await _page_request(request, page)
            return page_request, await page.read(page_request)
    except TimeoutError:
        raise StoreUnavailable from None


def _to_login(request: Request, *, is_part: bool) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    target = f"{LOGIN}?next={quote(path, safe='')}"
    if is_part:  # otherwise htmx would insert the form into the middle of the page
        return Response(status_code=401, headers={**HEADERS, "HX-Redirect": LOGIN})
    return RedirectResponse(target, 303, HEADERS)
