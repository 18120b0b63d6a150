"""Most frequent requests, answered in front of the framework: polls, passes, optimizer steps and samples.

They are declared as routes too, for the OpenAPI page and for methods other than POST. The framework's routing,
dependencies and serialization took a third of the processor time of a small pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoute(Protocol):
    """An endpoint of one path, for POST."""

    @property
    def path(self) -> str:
        """Path of the endpoint."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key, read the body, and send the answer, also that of an error."""


class DirectRoutes:
    """ASGI middleware that passes the POSTs of some paths to their endpoints, and all other requests on."""

    def __init__(self, app: ASGIApp, routes: Iterable[DirectRoute]) -> None:
        self.app = app
        self._route_by_path = {route.path: route for route in routes}

    # No coroutine of its own, because thousands of polls wait here.
    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one request."""
        route = self._route_by_path.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            return self.app(scope, receive, send)
        scope["route"] = route
        return route.serve(scope, receive, send)
