"""HEAD and OPTIONS for all routes. Probes and browsers send both."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class OtherMethods:
    """ASGI middleware that answers HEAD as GET, and OPTIONS with the methods of a path.

    The web server drops the body of an answer to HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        method = scope.get("method")
        if method not in ("HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"} if method == "HEAD" else {**scope}
        try:
            await self.app(inner, receive, send if method == "HEAD" else _allowing(send))
        finally:
            # The layers outside read the route that the router found.
            scope["route"] = inner.get("route")


def _allowing(send: Send) -> Send:
    """Turn a refusal of the method into an empty answer with the methods that the path has."""
    is_refused = False

    async def send_allowed(message: Message) -> None:
        nonlocal is_refused
        if message["type"] == "http.response.start" and message["status"] == 405:
            is_refused = True
            allowed = [each for each in message["headers"] if each[0].lower() == b"allow"]
            message = {**message, "status": 204, "headers": allowed}
        elif is_refused and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_allowed
