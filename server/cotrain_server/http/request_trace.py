"""Trace span of an API request, from its first line to the last byte of its answer, if tracing is
on.

Waiting polls have no span. The poll that delivers a result is reported with its op
(`trace_retrieval`).
"""

from __future__ import annotations

import time

import structlog
from opentelemetry.context import attach
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from starlette.types import Scope

from cotrain_server.services import Services
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.results import Result, ResultKind
from cotrain_store.monitoring.tracing import (
    context_of,
    current_traceparent,
    named,
    record,
    trace_id,
    traceparent_of,
    tracer,
)

_TRACED = ("/api/v1/", "/oai/", "/anthropic/")
#: Requests that repeat constantly, from waiting clients and from health checks.
_NOT_TRACED = frozenset(
    f"/api/v1/{name}"
    for name in (
        "retrieve_future", "retrieve_futures", "cancel_future", "session_heartbeat", "healthz",
        "telemetry",
    )
)  # fmt: skip
_SERVER_ERROR = 500


def begin_request(scope: Scope) -> Span | None:
    """Start the span of a request as a child of its client's span (`traceparent`). Return None if
    it has no span.

    From here on OpenTelemetry's current span is this one, or the one that a poll's client sent, and
    log lines contain its trace id.
    """
    traces = tracer()
    if traces is None:
        return None
    sent = [value for name, value in scope["headers"] if name == b"traceparent"]
    parent = context_of(sent[0].decode("latin-1") if len(sent) == 1 else "")
    if not scope["path"].startswith(_TRACED) or scope["path"] in _NOT_TRACED:
        attach(parent)
        return None
    span = traces.start_span(scope["method"], parent, SpanKind.SERVER)
    attach(set_span_in_context(span, parent))
    if traceparent := traceparent_of(span):
        structlog.contextvars.bind_contextvars(trace_id=trace_id(traceparent))
    return span


def end_request(span: Span, scope: Scope, route: str, status: int) -> None:
    """Report an answered request, with the ids that its log lines contain."""
    bound = structlog.contextvars.get_contextvars()
    names = {
        name: bound[name] for name in ("http_request", "tenant", "run", "seq") if name in bound
    }
    http = {
        "http.request.method": scope["method"], "http.route": route,
        "http.response.status_code": status,
    }  # fmt: skip
    span.update_name(f"{scope['method']} {route}")
    span.set_attributes(named(**http, **names))
    if status >= _SERVER_ERROR or not status:
        span.set_status(StatusCode.ERROR)
    span.end()


async def trace_retrieval(
    services: Services, tenant: TenantId, request: RequestId, began: float, result: Result
) -> None:
    """Report the poll that delivered a result, as a child of its client's span or of its op's."""
    traces = tracer()
    if traces is None:
        return
    of_op = await services.futures.trace_of(tenant, request)
    parent = current_traceparent() or of_op
    if not parent:
        return
    is_failure = result.kind is ResultKind.FAILURE
    record(
        traces, "retrieve_future", began, time.time(), parent, links=[of_op] if parent != of_op else [],
        request=request, tenant=tenant, outcome="failed" if is_failure else "ok",
    )  # fmt: skip
