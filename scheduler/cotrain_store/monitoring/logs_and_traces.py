"""Logs and traces of a process.

* Logs have one JSON object per line, time first, the same fields in every process, without keys, tokens or prompts.
  Lines of libraries, warnings and uncaught exceptions have the same format.
* Traces are OpenTelemetry spans, off by default. If `OTEL_EXPORTER_OTLP_ENDPOINT` is set, spans go to a collector
  (`otlp.py`). Across processes a span has the name of W3C's header `traceparent`, 55 characters; "" is no span.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

import structlog
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.typing import EventDict, Processor, WrappedLogger
from typing_extensions import override

from cotrain.version import __version__

#: Any text in an event that looks like an API key.
_KEY = re.compile(r"\b(?:tml|sk)-[A-Za-z0-9_.-]+")
#: Limit of one line, because log collectors cut lines at 16 KB.
REQUESTS_PER_LINE = 100
_FIRST = ("ts", "level", "process", "event")

log = structlog.get_logger()


def start_logs(process: str, level: str = "info") -> None:
    """Write all output of this process to stderr as JSON lines; called before anything else."""
    configure_logs(process, level)
    _take_over_loggers()
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_crash
    sys.unraisablehook = _log_unraisable
    threading.excepthook = _log_thread


def configure_logs(process: str, level: str = "info") -> None:
    """Write the project's own events to stderr as JSON lines with the process name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.format_exc_info,
            _in_order(process),
            structlog.processors.JSONRenderer(),
            _without_keys,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(_Unfailing(sys.stderr)),  # type: ignore[arg-type]  # all it calls is write and flush
        cache_logger_on_first_use=True,
    )


def log_requests(
    write: Callable[..., Any], event: str, requests: Sequence[str], *, cycle: int, **fields: object
) -> None:
    """Log a cycle with all its requests' ids; a large cycle gets additional lines.

    `write` is a logger's method of the intended level.
    """
    write(event, cycle=cycle, **fields, requests=list(requests[:REQUESTS_PER_LINE]))
    for first in range(REQUESTS_PER_LINE, len(requests), REQUESTS_PER_LINE):
        more = list(requests[first : first + REQUESTS_PER_LINE])
        write("cycle_requests", cycle=cycle, of=event, requests=more)


def looks_like_key(text: str) -> bool:
    """Return True if a text contains a key that the log would mask."""
    return _KEY.search(text) is not None


class _Unfailing:
    """A stream whose errors, such as a full disk, do not reach the caller."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write a line; drop it on an error, because there is no other output."""
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush."""
        with suppress(OSError):
            self._stream.flush()


class _AsEvent(logging.Handler):
    """Handler that forwards log records of libraries to this log."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  # any error of a library's arguments: the template is still useful
            text = str(record.msg)
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        log.log(level, text, logger=record.name, exc_info=record.exc_info or None)


def _take_over_loggers() -> None:
    """Send libraries' warnings and errors to this log only; some libraries have their own handlers."""
    logging.basicConfig(level=logging.WARNING, handlers=[_AsEvent()], force=True)
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):  # otherwise a placeholder for a parent name
            logger.handlers.clear()
            logger.propagate = True


def _in_order(process: str) -> Processor:
    def ordered(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["process"] = process
        return {name: event.pop(name) for name in _FIRST} | dict(event)

    return ordered


def _without_keys(_: WrappedLogger, __: str, line: Any) -> str:
    """Mask keys in the finished line: a key may be in any field, at any depth."""
    return _KEY.sub("[key]", line)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("crashed", exc_info=(kind, error, trace))


def _log_thread(crash: threading.ExceptHookArgs) -> None:
    name = crash.thread.name if crash.thread else ""
    log.critical("thread_crashed", thread=name, exc_info=(crash.exc_type, crash.exc_value, crash.exc_traceback))


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    log.error("exception_ignored", where=found.err_msg, exc_info=(found.exc_type, found.exc_value, found.exc_traceback))


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
    if not is_asked_for(os.environ) or _started:
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


def is_asked_for(environ: Mapping[str, str]) -> bool:
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
