"""Export of spans to a collector: the only module that imports opentelemetry (extra `otel`).

Spans are queued, and a thread sends many at once. If the queue is full, a span is dropped and counted. A slow
or unreachable collector therefore never delays the traced code.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from typing_extensions import override

from cotrain.version import __version__
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.metrics import TRACE_SPANS_DROPPED
from cotrain_store.monitoring.traceparent import read_traceparent

log = structlog.get_logger()

#: Maximum time in s for which a stop waits for unsent spans.
STOP_S = 2.0
_LOGGED_EVERY_S = 60.0
_PREFIX = "cotrain."
#: Defaults of the library: maximum number of queued spans, and of spans in one message.
_WAITING, _BATCH = 2048, 512
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpSpan:
    """Unfinished span."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.traceparent = _name_of(span.get_span_context())

    def end(self, name: str = "", *, failed: bool = False, **attributes: Any) -> None:
        """Finish and report the span. A `name` replaces its first name."""
        if name:
            self._span.update_name(name)
        self._span.set_attributes(_named(attributes))
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class OtlpTracer:
    """Tracer of one process. It sets no global state, so libraries do not report through it."""

    def __init__(self, process: str, instance: str, *, decides: bool) -> None:
        # An unreachable collector is logged as `spans_lost` at most once per minute.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._provider = TracerProvider(
            sampler=None if decides else ALWAYS_ON,  # None: OTEL_TRACES_SAMPLER
            resource=_resource(process, instance),
            id_generator=_Ids(),
            shutdown_on_exit=False,
        )
        self._processor = BoundedProcessor(OTLPSpanExporter(), _queue_size(), Source(process))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("cotrain", __version__)
        self._scope = InstrumentationScope("cotrain", __version__)
        atexit.register(self.stop)

    def begin(
        self, name: str, parent: str = "", *, is_server: bool = False, began: float | None = None
    ) -> OtlpSpan:
        """Start a span now or at `began`. Without a parent it starts a new trace."""
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        start = None if began is None else _ns(began)
        return OtlpSpan(self._tracer.start_span(name, _under(parent), kind, start_time=start))

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
        """Report a finished span. Return its traceparent for other processes."""
        above = _context(parent)
        trace = above.trace_id if above else secrets.randbits(128)
        context = SpanContext(trace, secrets.randbits(64), is_remote=False, trace_flags=_SAMPLED)
        known = [each for link in links if (each := _context(link))]
        # The span is built here because `start_span` takes five times as long, and a worker's cycle has many spans.
        self._processor.on_end(
            ReadableSpan(
                name,
                context,
                above,
                self._provider.resource,
                _named(attributes),
                links=[Link(each) for each in known],
                status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
                start_time=_ns(began),
                end_time=_ns(max(began, ended)),
                instrumentation_scope=self._scope,
            )
        )
        return _name_of(context)

    def stop(self) -> None:
        """Send the queued spans, for at most STOP_S."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(STOP_S)


class WaitingSpans:
    """Counter of queued spans, and of spans dropped because the queue is full."""

    def __init__(self, most: int, source: Source) -> None:
        self._most = most
        self._dropped = TRACE_SPANS_DROPPED[source]
        self._count = 0
        self._lock = threading.Lock()
        self._logged_at = -_LOGGED_EVERY_S

    def take(self) -> bool:
        """Count one more queued span. Return False if the queue is full."""
        with self._lock:
            if self._count < self._most:
                self._count += 1
                return True
        self.lost(1, "queue_full")
        return False

    def sent(self, count: int) -> None:
        """Subtract spans that have left the queue."""
        with self._lock:
            self._count -= count

    def lost(self, count: int, reason: str) -> None:
        """Count spans that are lost."""
        self._dropped.labels(reason).inc(count)
        now = time.monotonic()
        if now - self._logged_at >= _LOGGED_EVERY_S:
            self._logged_at = now
            log.warning("spans_lost", reason=reason)


class BoundedProcessor(BatchSpanProcessor):
    """Batch processor of the library that also counts dropped spans. The library drops them silently."""

    def __init__(self, exporter: SpanExporter, most: int, source: Source) -> None:
        self._waiting = WaitingSpans(most, source)
        super().__init__(
            _CountingExporter(exporter, self._waiting),
            max_queue_size=most,
            max_export_batch_size=most if most < _BATCH else None,
        )

    @override
    def on_end(self, span: ReadableSpan) -> None:
        """Queue a finished span."""
        if span.context and span.context.trace_flags.sampled and self._waiting.take():
            super().on_end(span)


class _CountingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, waiting: WaitingSpans) -> None:
        self._exporter = exporter
        self._waiting = waiting

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._waiting.sent(len(spans))
            if result is not SpanExportResult.SUCCESS:
                self._waiting.lost(len(spans), "not_sent")
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Ids(IdGenerator):
    """Generator of ids without `random`, which a program in this process may have seeded."""

    @override
    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    @override
    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1


def _queue_size() -> int:
    asked = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return int(asked) if asked.isdecimal() and int(asked) else _WAITING


def _resource(process: str, instance: str) -> Resource:
    own = {"service.name": f"cotrain-{process}", "service.instance.id": instance}
    own["service.version"] = __version__
    # A service name of the operator (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) takes precedence over ours.
    chosen = Resource.create()
    is_named = "OTEL_SERVICE_NAME" in os.environ or (
        "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    )
    if is_named:
        del own["service.name"]
    return chosen.merge(Resource(own))


def _under(parent: str) -> Context:
    """Return the context of a child; an empty one for a span that begins a trace."""
    context = _context(parent)
    return set_span_in_context(NonRecordingSpan(context), Context()) if context else Context()


def _context(traceparent: str) -> SpanContext | None:
    parts = read_traceparent(traceparent)
    if parts is None:
        return None
    trace, span, flags = parts
    return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(flags))


def _name_of(context: SpanContext) -> str:
    if not context.trace_flags.sampled:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with the prefix `cotrain.`. Names with a dot are standard names and stay unchanged."""
    return {
        name if "." in name else _PREFIX + name: value
        for name, value in attributes.items()
        if value is not None
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
