"""Trace span of an API request, from its first line to the last byte of its answer, if tracing is
on.

Polls have no span of their own, because most deliver no result. `trace_retrieval` reports the poll
that does.
"""

import time

import structlog
from opentelemetry.context import attach
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from starlette.types import Scope

from cotrain_server.services import Services
from cotrain_store.messages.ids import RequestId, TenantId
from cotrain_store.messages.ops import Result, ResultKind
from cotrain_store.monitoring.logs_and_traces import (
    context_of,
    current_traceparent,
    named,
    record,
    trace_id,
    traceparent_of,
    tracer,
)

_TRACED = ("/api/v1/", "/oai/", "/anthropic/")
#: Paths of requests that waiting clients and health checks repeat every few seconds. They have no span, and start at once.
REPEATED = frozenset(
    f"/api/v1/{name}"
    for name in (
        "retrieve_future", "retrieve_futures", "cancel_future", "session_heartbeat", "healthz",
        "telemetry",
    )
)  # fmt: skip
_SERVER_ERROR = 500


def begin_request(scope: Scope) -> Span | None:
    """Start the span of a request as a child of its client's span, and return it; None if tracing is off or requests
    of this path have none.

    The header `traceparent` names the client's span. OpenTelemetry's current span becomes the new
    one, or the client's if there is no new one. Log lines contain the trace id of a new span.
    """
    traces = tracer()
    if traces is None:
        return None
    sent = [value for name, value in scope["headers"] if name == b"traceparent"]
    parent = context_of(sent[0].decode("latin-1") if len(sent) == 1 else "")
    if not scope["path"].startswith(_TRACED) or scope["path"] in REPEATED:
        attach(parent)
        return None
    span = traces.start_span(scope["method"], parent, SpanKind.SERVER)
    attach(set_span_in_context(span, parent))
    if traceparent := traceparent_of(span):
        structlog.contextvars.bind_contextvars(trace_id=trace_id(traceparent))
    return span


def end_request(span: Span, scope: Scope, route: str, status: int) -> None:
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


async def trace_retrieval(
    services: Services, tenant: TenantId, request: RequestId, began: float, result: Result
) -> None:
    """Record the poll that delivered a result, as a child of its client's span, or else of the span
    of its op.
    """
    traces = tracer()
    if traces is None:
        return
    op_span = await services.futures.trace_of(tenant, request)
    parent = current_traceparent() or op_span
    if not parent:
        return
    is_failure = result.kind is ResultKind.FAILURE
    record(
        traces, "retrieve_future", began, time.time(), parent, links=[op_span] if parent != op_span else [],
        request=request, tenant=tenant, outcome="failed" if is_failure else "ok",
    )  # fmt: skip
