"""Rendering of pages: templates, response headers, the route class of pages, and static files.

Static files are read once, and served under a name that contains a hash of their content.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from typing_extensions import override

from cotrain.version import __version__
from cotrain_server.errors import status_of
from cotrain_server.http.path_prefix import path_prefix
from cotrain_server.http.responses import finite_json
from cotrain_server.http.tenant_routes import Handler
from cotrain_server.settings import ServerSettings
from cotrain_server.ui import number_format
from cotrain_store.errors import Reason, Refused, StoreUnavailable
from cotrain_store.redis_client.connection import CONNECTION_LOST

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent / "static"
HOME = "/ui"
MOUNTED_AT = f"{HOME}/static"
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}
_A_YEAR_S = 365 * 24 * 3600

_FILES = {
    str(path.relative_to(FOLDER)): path.read_bytes() for path in sorted(FOLDER.rglob("*")) if path.suffix in _TYPES
}
_HASHES = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in _FILES.items()}


def _static_url(name: str) -> str:
    """Return the URL of a static file. Raises KeyError for an unknown file."""
    return f"{MOUNTED_AT}/{name}?v={_HASHES[name]}"


@router.get(MOUNTED_AT + "/{name:path}", response_model=None)
async def static_file(name: str, v: str = "") -> Response:
    """Return a static file. Browsers cache it if the URL contains its hash."""
    content = _FILES.get(name)
    if content is None:
        raise HTTPException(404)
    headers: dict[str, Any] = {"X-Content-Type-Options": "nosniff"}
    if v == _HASHES[name]:
        headers["Cache-Control"] = f"public, max-age={_A_YEAR_S}, immutable"
    return Response(content, media_type=_TYPES[Path(name).suffix], headers=headers)


#: Only our own scripts and styles, no other host, no frames.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.policies["json.dumps_function"] = lambda value, **_: finite_json(value)
_environment.globals.update(static=_static_url, version=__version__)
_environment.filters.update(number_format.FILTERS)


def html(template: str, context: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    """Return a rendered template. All values in `context` are escaped."""
    text = _environment.get_template(template).render(context)
    return HTMLResponse(text, status, HEADERS)


class PageRoute(APIRoute):
    """A route of browsers. It refuses forms of other sites, and answers refusals with an error page instead of JSON."""

    @override
    def get_route_handler(self) -> Handler:
        """Return a handler that checks the origin of a form, and runs the route."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                if request.method == "POST":
                    _check_origin(request)
                return await handle(request)
            except CONNECTION_LOST:
                return _error_page(request, StoreUnavailable())
            except Refused as error:
                return _error_page(request, error)

        return answer


def _check_origin(request: Request) -> None:
    """Raise CROSS_SITE_FORM for a form that another site sent.

    Browsers name the origin of every form, and under HTTPS its relation to this server. A request without these
    headers is not from a browser, so no other site caused it.
    """
    settings: ServerSettings = request.app.state.services.settings
    relation, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    own = {request.headers.get("host", ""), urlsplit(settings.public_url or "").netloc} - {""}
    if relation is not None:
        is_own = relation in ("same-origin", "none")
    else:
        is_own = origin is None or origin.partition("://")[2] in own
    if not is_own:
        raise Refused(Reason.CROSS_SITE_FORM)


def page_router() -> APIRouter:
    """Return a router of pages and forms, which are not part of the API."""
    return APIRouter(include_in_schema=False, route_class=PageRoute)


def _error_page(request: Request, error: Exception) -> HTMLResponse:
    """Return an error page. After a form it leads back to the page of the form."""
    settings: ServerSettings = request.app.state.services.settings
    back = urlsplit(request.headers.get("referer", "")).path.removeprefix(path_prefix(settings.public_url))
    is_of_form = request.method == "POST" and back.startswith(f"{HOME}/")
    shown = {"message": str(error), "status": status_of(error), "back": back if is_of_form else ""}
    return html("error.html", shown, status_of(error))
