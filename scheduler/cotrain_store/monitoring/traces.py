"""Traces of a process: OpenTelemetry spans, off by default.

If `OTEL_EXPORTER_OTLP_ENDPOINT` is set, spans go to a collector (`otlp.py`). Across processes a span has the name of
W3C's header `traceparent`, 55 characters; "" is no span.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cotrain.version import __version__

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PREFIX = "cotrain."
_W3C = TraceContextTextMapPropagator()


class TracingRefused(Exception):
    """Tracing is configured and unavailable; the message has the remedy."""


def context_of(traceparent: str) -> Context:
    """Return the context of a child. It is empty, for a new trace, if `traceparent` is empty or invalid."""
    return _W3C.extract({"traceparent": traceparent}, Context())


def traceparent_of(span: Span) -> str:
    """Return the name of a span for other processes; "" if it is not sampled."""
    if not span.get_span_context().trace_flags.sampled:
        return ""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier["traceparent"]


def current_traceparent() -> str:
    """Return the name of the current request's span, or of its client's; "" if it is not traced."""
    return traceparent_of(get_current_span())


def trace_id(traceparent: str) -> str:
    """Return the trace that a span belongs to, in hexadecimal; "" for no span."""
    return traceparent[3:35]


def named(**attributes: Any) -> dict[str, Any]:
    """Return attributes with the prefix `cotrain.`. Names with a dot are standard names and stay unchanged."""
    return {name if "." in name else _PREFIX + name: value for name, value in attributes.items() if value is not None}


def nanoseconds(seconds: float) -> int:
    """Return a time of the wall clock in the unit of spans."""
    return int(seconds * 1e9)


def record(
    tracer: Tracer,
    name: str,
    began: float,
    ended: float,
    parent: str = "",
    *,
    links: Sequence[str] = (),
    failed: bool = False,
    **attributes: Any,
) -> str:
    """Report a finished span; times are seconds of the wall clock. Return its name for other processes."""
    contexts = [get_current_span(context_of(link)).get_span_context() for link in links]
    span = tracer.start_span(
        name,
        context_of(parent),
        attributes=named(**attributes),
        links=[Link(each) for each in contexts if each.is_valid],
        start_time=nanoseconds(began),
    )
    if failed:
        span.set_status(StatusCode.ERROR)
    span.end(nanoseconds(max(began, ended)))
    return traceparent_of(span)


_started: list[Tracer] = []


def tracer() -> Tracer | None:
    """Return this process's tracer; None if tracing is off, at the cost of one list check."""
    return _started[0] if _started else None


def start_tracing(process: str, instance: str, *, decides: bool = False) -> None:
    """Start to report this process's spans, if the environment configures it.

    A process that `decides` samples by OTEL_TRACES_SAMPLER; the others report spans whose parent is
    sampled. Raises TracingRefused: the configuration is unsupported, or a package is missing.
    """
    if not is_configured(os.environ) or _started:
        return
    try:
        from cotrain_store.monitoring.otlp import open_provider  # needs the extra `otel`
    except ModuleNotFoundError as missing:
        raise TracingRefused(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but what sends spans there is not installed: "
            "pip install 'cotrain[otel]', or unset it."
        ) from missing
    provider = open_provider(process, instance, decides=decides)
    _started.append(provider.get_tracer("cotrain", __version__))


def is_configured(environ: Mapping[str, str]) -> bool:
    """Return True if the environment configures traces. Raises TracingRefused for an unsupported configuration."""
    endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "")
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or exporter == "none" or is_disabled:
        return False
    if exporter != "otlp":
        raise TracingRefused(f"OTEL_TRACES_EXPORTER={exporter}: spans are sent by otlp, or none.")
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise TracingRefused(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: spans are sent by http/protobuf alone.")
    if not endpoint.startswith(("http://", "https://")):
        raise TracingRefused(f"OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}: not an http address.")
    return True
