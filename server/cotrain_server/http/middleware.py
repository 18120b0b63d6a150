"""Outermost layer of HTTP: assigns request ids, measures requests, and catches unexpected errors.

This is one of two places that may catch every exception. It logs the location of the error, never
the message of an exception, which may quote a tenant's data.

The request id appears in the answer, in the log and in traces. It is the client's own id or a
generated one.
"""

import itertools
import re
import secrets
import time
import traceback
from collections.abc import Iterable

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotrain_server.errors import CLIENT_CLOSED_REQUEST
from cotrain_server.http.error_responses import internal_error_at
from cotrain_server.http.request_trace import REPEATED, begin_request, end_request
from cotrain_server.services import Services
from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.logs_and_traces import looks_like_key

HEADER = b"x-request-id"
#: Characters that are safe in a log line, a header and a shell.
_SAFE = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
#: Generated ids: the start is of this process, and the rest counts, without a call of the kernel for each request.
_PROCESS, _NUMBERS = secrets.token_hex(4), itertools.count()


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the `X-Request-Id` of a request if it is 1 to 64 safe characters and no key; else a
    new id.
    """
    given = [value.decode("latin-1") for name, value in headers if name == HEADER]
    if len(given) == 1 and _SAFE.fullmatch(given[0]) and not looks_like_key(given[0]):
        return given[0]
    return f"{_PROCESS}{next(_NUMBERS):08x}"


log = structlog.get_logger()

#: Answers that are not logged: "not yet" to a poll, "slower" to a sampling client, and "not ready"
#: to a waiting probe.
_NOT_LOGGED = {
    ("/api/v1/retrieve_future", 408),
    ("/api/v1/retrieve_futures", 408),
    ("/api/v1/asample", 429),
    ("/readyz", 503),
}


class RequestMiddleware:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, access_log: bool = False) -> None:
        self.app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Every log line written during it contains its id."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(http_request=request_id)
        span = begin_request(scope)
        started_at, statuses = time.perf_counter(), list[int]()

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                added = [(HEADER, request_id.encode())]
                if _is_leaving(scope):
                    added.append((b"connection", b"close"))
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            if (services := _services(scope)) and scope["path"] not in REPEATED:
                await services.parser.loop_slots.take()
            await self.app(scope, receive, send_noted)
        except ClientDisconnect:
            statuses.append(CLIENT_CLOSED_REQUEST)
        except Exception as error:  # noqa: BLE001  # the HTTP edge answers whatever happened
            _log_crash(error)
            if not statuses:
                await internal_error_at(scope, request_id)(scope, receive, send_noted)
        # Use the route template, not the path: ids must not become labels, and query strings must
        # not reach the log.
        route, status = getattr(scope.get("route"), "path", "unmatched"), (statuses or [0])[0]
        self._note(scope, route, status, time.perf_counter() - started_at)
        if span is not None:
            end_request(span, scope, route, status)

    def _note(self, scope: Scope, route: str, status: int, duration_s: float) -> None:
        metrics.HTTP_REQUESTS.labels(route, status).inc()
        metrics.HTTP_DURATION.labels(route).observe(duration_s)
        if status >= 400 and (route, status) not in _NOT_LOGGED:
            _log_answer("request_refused", scope, route, status, duration_s)
        elif self._access_log:
            _log_answer("request_answered", scope, route, status, duration_s)


def _is_leaving(scope: Scope) -> bool:
    """Return True if this process drains: a repeated request must not reach a connection that is
    being closed.
    """
    services = _services(scope)
    return services is not None and services.draining


def _services(scope: Scope) -> Services | None:
    services: Services | None = getattr(scope["app"].state, "services", None)
    return services


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
