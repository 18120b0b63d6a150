"""ASGI middleware for a server below a path of its host, behind a proxy (`COTRAIN_PUBLIC_URL`)."""

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Headers that contain an address.
_ADDRESS_HEADERS = (b"location", b"hx-redirect")
#: Start of an attribute of a page that contains one of our addresses. Templates escape the quotes of all values.
_LINK = b'="/ui'


def path_prefix(public_url: str | None) -> str:
    """Return the path of an address without a trailing slash, or "" if it has none."""
    return urlsplit(public_url or "").path.rstrip("/")


class PathPrefix:
    """ASGI middleware for the path of `COTRAIN_PUBLIC_URL`, which starts with a slash and has no trailing one.

    Routes, templates and cookies are written for the root. This layer removes the prefix from a request, if the proxy
    has not, and adds it to every address that leads a browser to another page.
    """

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self.app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request as if it had arrived at the root."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = self._at_the_root(scope)
        if not _is_page(scope["path"]):
            await self.app(scope, receive, send)
            return
        start: list[Message] = []

        async def send_below(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append({**message, "headers": self._headers(message["headers"])})
            elif start and _is_html(start[0]) and not message.get("more_body"):
                body = message["body"].replace(_LINK, b'="' + self._prefix.encode() + b"/ui")
                await send(_of_length(start.pop(), len(body)))
                await send({**message, "body": body})
            else:
                if start:
                    await send(start.pop())
                await send(message)

        await self.app(scope, receive, send_below)

    def _at_the_root(self, scope: Scope) -> Scope:
        path: str = scope["path"]
        if path != self._prefix and not path.startswith(f"{self._prefix}/"):
            return scope
        raw = scope.get("raw_path") or path.encode()
        cut = {"path": path[len(self._prefix) :] or "/", "raw_path": raw[len(self._prefix) :] or b"/"}
        return {**scope, **cut}

    def _headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        prefix, prefixed = self._prefix.encode(), list[tuple[bytes, bytes]]()
        for name, value in headers:
            if name.lower() in _ADDRESS_HEADERS and value.startswith(b"/"):
                value = prefix + value
            elif name.lower() == b"set-cookie":
                value = value.replace(b"Path=/ui", b"Path=" + prefix + b"/ui")
            prefixed.append((name, value))
        return prefixed


def _is_page(path: str) -> bool:
    return path in ("/", "/ui") or path.startswith("/ui/")


def _is_html(start: Message) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(b"text/html") for name, value in start["headers"])


def _of_length(start: Message, length: int) -> Message:
    others = [each for each in start["headers"] if each[0].lower() != b"content-length"]
    return {**start, "headers": [*others, (b"content-length", str(length).encode())]}
