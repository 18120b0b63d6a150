"""Traces: the span that a piece of work belongs to, and a report of it once it is over. Off unless asked for.

Where `OTEL_EXPORTER_OTLP_ENDPOINT` is set, spans go to a collector (`otlp.py`, which alone imports
opentelemetry). Across processes a span is named as W3C's header `traceparent` names it; "" is none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

Attributes = Mapping[str, str | int | float | bool]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

#: The span, or the client's span, of the request that is being served; "" where it is not traced.
CURRENT: ContextVar[str] = ContextVar("cotrain_traceparent", default="")


class TracingRefused(Exception):
    """Tracing is asked for and cannot be had; the message says what to do."""


class Span(Protocol):
    """A span that is not over."""

    traceparent: str
    """Its name for other processes; "" where it is not sampled."""

    def end(self, name: str = "", *, failed: bool = False, **attributes: Any) -> None:
        """Report it, under this name instead of its first one if there is one."""


class Tracer(Protocol):
    """Makes and reports spans; times are seconds of the wall clock. No call waits for a collector."""

    def begin(
        self, name: str, parent: str = "", *, is_server: bool = False, began: float | None = None
    ) -> Span:
        """Begin a span, now or then; that of a new trace without a parent."""

    def record(
        self,
        name: str,
        began: float,
        ended: float,
        parent: str = "",
        *,
        links: Sequence[str] = (),
        failed: bool = False,
        **attributes: Any,
    ) -> str:
        """Report a span that is over; return its name for other processes."""


_started: list[Tracer] = []


def tracer() -> Tracer | None:
    """Return this process's tracer; None where tracing is off, which is a look into an empty list."""
    return _started[0] if _started else None


def start_tracing(process: str, instance: str, *, decides: bool = False) -> None:
    """Report this process's spans from now on, where the environment asks for that.

    A process that `decides` samples by OTEL_TRACES_SAMPLER; the others report what belongs to a span that
    is sampled.

    Raises:
        TracingRefused: it asks for what is not there.
    """
    if not is_asked_for(os.environ) or _started:
        return
    try:
        from cotrain_store.monitoring.otlp import OtlpTracer  # opentelemetry: only where it is used
    except ModuleNotFoundError as missing:
        raise TracingRefused(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but what sends spans there is not installed: "
            "pip install 'cotrain[otel]', or unset it."
        ) from missing
    _started.append(OtlpTracer(process, instance, decides=decides))


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Tell whether the environment asks for traces. Raises TracingRefused for a way that is not there."""
    endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "")
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or exporter == "none" or is_disabled:
        return False
    if exporter != "otlp":
        raise TracingRefused(f"OTEL_TRACES_EXPORTER={exporter}: spans are sent by otlp, or none.")
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise TracingRefused(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: spans are sent by http/protobuf alone."
        )
    if not endpoint.startswith(("http://", "https://")):
        raise TracingRefused(f"OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}: not an http address.")
    return True
