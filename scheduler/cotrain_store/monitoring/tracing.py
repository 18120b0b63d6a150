"""Traces: the span of a piece of work, and its report at the end. Off by default.

If `OTEL_EXPORTER_OTLP_ENDPOINT` is set, spans go to a collector (`otlp.py`, which alone imports
opentelemetry). Across processes a span has the name of W3C's header `traceparent`; "" is no span.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

Attributes = Mapping[str, str | int | float | bool]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

#: Span of the current request, or the client's span; "" if it is not traced.
CURRENT: ContextVar[str] = ContextVar("cotrain_traceparent", default="")


class TracingRefused(Exception):
    """Tracing is configured and unavailable; the message has the remedy."""


class Span(Protocol):
    """An open span."""

    traceparent: str
    """Its name for other processes; "" if it is not sampled."""

    def end(self, name: str = "", *, failed: bool = False, **attributes: Any) -> None:
        """Report the span; `name`, if given, replaces its first name."""


class Tracer(Protocol):
    """Maker and reporter of spans; times are seconds of the wall clock. No call waits for a
    collector.
    """

    def begin(
        self, name: str, parent: str = "", *, is_server: bool = False, began: float | None = None
    ) -> Span:
        """Begin a span, now or at `began`; without a parent it starts a new trace."""

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
        """Report a finished span; return its name for other processes."""


_started: list[Tracer] = []


def tracer() -> Tracer | None:
    """Return this process's tracer; None if tracing is off, at the cost of one list check."""
    return _started[0] if _started else None


def start_tracing(process: str, instance: str, *, decides: bool = False) -> None:
    """Start to report this process's spans, if the environment configures it.

    A process that `decides` samples by OTEL_TRACES_SAMPLER; the others report spans whose parent is
    sampled.

    Raises:
        TracingRefused: the configuration is unsupported, or a package is missing.
    """
    if not is_asked_for(os.environ) or _started:
        return
    try:
        from cotrain_store.monitoring.otlp import (
            OtlpTracer,
        )  # imports opentelemetry only if it is used
    except ModuleNotFoundError as missing:
        raise TracingRefused(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but what sends spans there is not installed: "
            "pip install 'cotrain[otel]', or unset it."
        ) from missing
    _started.append(OtlpTracer(process, instance, decides=decides))


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Return True if the environment configures traces. Raises TracingRefused for an unsupported
    configuration.
    """
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
