"""ASGI middleware around the application, in the order in which a request passes it (after `path_prefix.py`).

* `RequestMiddleware`: id, measurements, span, and the answer to an unexpected error.
* `HeadAsGet`: HEAD.
* `DirectRoutes`: the most frequent requests, answered in front of the framework.
"""

import itertools
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Iterable
from functools import lru_cache
from typing import Protocol

import structlog
from opentelemetry.context import attach
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from prometheus_client import Counter, Histogram
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotrain_server.errors import CLIENT_CLOSED_REQUEST
from cotrain_server.http.responses import internal_error_at
from cotrain_server.services import Services
from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.logs import looks_like_key
from cotrain_store.monitoring.traces import context_of, named, trace_id, traceparent_of, tracer

log = structlog.get_logger()

_ID_HEADER = b"x-request-id"
#: Characters that are safe in a log line, a header and a shell.
_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
#: Generated ids: the start is of this process, and the rest counts, without a call of the kernel for each request.
_PROCESS, _NUMBERS = secrets.token_hex(4), itertools.count()
#: Answers that are not logged: a pending poll, a sample into a full queue, and a probe of a server that is not ready.
_NOT_LOGGED = {
    ("/api/v1/retrieve_future", 408),
    ("/api/v1/retrieve_futures", 408),
    ("/api/v1/asample", 429),
    ("/readyz", 503),
}
_TRACED = ("/api/v1/", "/oai/", "/anthropic/")
#: Paths of requests that waiting clients and health checks repeat every few seconds. They have no span, and start at once.
_REPEATED = frozenset(
    f"/api/v1/{name}"
    for name in (
        "retrieve_future", "retrieve_futures", "cancel_future", "session_heartbeat", "healthz",
        "telemetry",
    )
)  # fmt: skip
_SERVER_ERROR = 500


class RequestMiddleware:
    """Layer around all requests: ids, metrics, spans, log lines, and answers to unexpected errors.

    This is one of two places that may catch every exception. It logs the location of the error, never the message of an
    exception, which may quote a tenant's data.
    """

    def __init__(self, app: ASGIApp, *, access_log: bool = False) -> None:
        self.app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Every log line written during it contains its id."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        services: Services | None = getattr(scope["app"].state, "services", None)
        request_id = request_id_of(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(http_request=request_id)
        span = _begin_span(scope)
        started_at, statuses = time.perf_counter(), list[int]()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                added = [(_ID_HEADER, request_id.encode())]
                if services is not None and services.draining:
                    added.append((b"connection", b"close"))  # a repeated request must reach another process
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            if services is not None and scope["path"] not in _REPEATED:
                await services.parser.loop_slots.take()
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            statuses.append(CLIENT_CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001  # the HTTP edge answers whatever happened
            _log_crash(error)
            if not statuses:
                await internal_error_at(scope, request_id)(scope, receive, send_with_id)
        # Use the route template, not the path: ids must not become labels, and query strings must not reach the log.
        route, status = getattr(scope.get("route"), "path", "unmatched"), (statuses or [0])[0]
        self._measure(scope, route, status, time.perf_counter() - started_at)
        if span is not None:
            _end_span(span, scope, route, status)

    def _measure(self, scope: Scope, route: str, status: int, duration_s: float) -> None:
        requests, duration = _metrics_of(route, status)
        requests.inc()
        duration.observe(duration_s)
        if status >= 400 and (route, status) not in _NOT_LOGGED:
            _log_answer("request_refused", scope, route, status, duration_s)
        elif self._access_log:
            _log_answer("request_answered", scope, route, status, duration_s)


@lru_cache(maxsize=1024)
def _metrics_of(route: str, status: int) -> tuple[Counter, Histogram]:
    return metrics.HTTP_REQUESTS.labels(route, status), metrics.HTTP_DURATION.labels(route)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the `X-Request-Id` of a request if it is 1 to 64 safe characters and no key, else a new id.

    It appears in the answer, in the log and in traces.
    """
    given = [value.decode("latin-1") for name, value in headers if name == _ID_HEADER]
    if len(given) == 1 and _SAFE.fullmatch(given[0]) and not looks_like_key(given[0]):
        return given[0]
    return f"{_PROCESS}{next(_NUMBERS):08x}"


def _begin_span(scope: Scope) -> Span | None:
    """Start the span of a request as a child of its client's span, and return it; None if tracing is off.

    Polls have none either, because most deliver no result. `trace_retrieval` reports the poll that does.

    The header `traceparent` names the client's span. OpenTelemetry's current span becomes the new
    one, or the client's if there is no new one. Log lines contain the trace id of a new span.
    """
    traces = tracer()
    if traces is None:
        return None
    sent = [value for name, value in scope["headers"] if name == b"traceparent"]
    parent = context_of(sent[0].decode("latin-1") if len(sent) == 1 else "")
    if not scope["path"].startswith(_TRACED) or scope["path"] in _REPEATED:
        attach(parent)
        return None
    span = traces.start_span(scope["method"], parent, SpanKind.SERVER)
    attach(set_span_in_context(span, parent))
    if traceparent := traceparent_of(span):
        structlog.contextvars.bind_contextvars(trace_id=trace_id(traceparent))
    return span


def _end_span(span: Span, scope: Scope, route: str, status: int) -> None:
    """End the span of a request, with the ids that its log lines contain. Status 0: no answer."""
    bound = structlog.contextvars.get_contextvars()
    ids = {name: bound[name] for name in ("http_request", "tenant", "run", "seq") if name in bound}
    http = {
        "http.request.method": scope["method"], "http.route": route,
        "http.response.status_code": status,
    }  # fmt: skip
    span.update_name(f"{scope['method']} {route}")
    span.set_attributes(named(**http, **ids))
    if status >= _SERVER_ERROR or not status:
        span.set_status(StatusCode.ERROR)
    span.end()


def _log_answer(event: str, scope: Scope, route: str, status: int, duration_s: float) -> None:
    tenant = scope["state"].get("tenant")
    log.info(
        event,
        tenant=tenant and tenant.id,
        key_name=tenant and tenant.name,
        method=scope["method"],
        route=route,
        code=status,
        dur_ms=round(duration_s * 1000, 1),
    )


def _log_crash(error: Exception) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    log.error("request_crashed", error=type(error).__name__, where=where)


class HeadAsGet:
    """ASGI middleware that answers HEAD as GET. The web server drops the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope.get("method") != "HEAD":
            await self.app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"}
        try:
            await self.app(inner, receive, send)
        finally:
            # The layers outside read the route that the router found.
            scope["route"] = inner.get("route")


class DirectRoute(Protocol):
    """An endpoint of one path, for POST."""

    @property
    def path(self) -> str:
        """Path of the endpoint."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key, read the body, and send the answer, also that of an error."""


class DirectRoutes:
    """ASGI middleware that serves the most frequent POSTs without the framework, and passes on all other requests.

    The frequent ones are polls, passes, optimizer steps and samples. Their paths are declared as routes too, for the
    OpenAPI page and for other methods. The framework's routing, dependencies and serialization took a third of the
    processor time of a small pass.
    """

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
