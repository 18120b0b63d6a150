"""Export of spans to a collector: the only module that needs the extra `otel`.

Spans are queued, and a thread sends many at once. If the queue is full, a span is dropped and counted. A slow
or unreachable collector therefore never delays the traced code.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from typing_extensions import override

from cotrain.version import __version__
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.metrics import TRACE_SPANS_DROPPED

log = structlog.get_logger()

#: Maximum time in s for which a stop waits for unsent spans.
STOP_S = 2.0
_LOGGED_EVERY_S = 60.0
#: Defaults of the library: maximum number of queued spans, and of spans in one message.
_WAITING, _BATCH = 2048, 512


def open_provider(process: str, instance: str, *, decides: bool) -> TracerProvider:
    """Return the source of this process's spans. It sets no global state, so libraries do not report through it.

    With `decides`, OTEL_TRACES_SAMPLER selects the traces; without, every span is reported.
    """
    # An unreachable collector is logged as `spans_lost` at most once per minute.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    provider = TracerProvider(
        sampler=None if decides else ALWAYS_ON,
        resource=_resource(process, instance),
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_links=SpanLimits.UNSET),  # a cycle has a link to each of its ops
    )
    provider.add_span_processor(BoundedProcessor(OTLPSpanExporter(), _queue_size(), Source(process)))
    atexit.register(stop, provider)
    return provider


def stop(provider: TracerProvider) -> None:
    """Send the queued spans, for at most STOP_S."""
    sending = threading.Thread(target=provider.shutdown, daemon=True)
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


def _queue_size() -> int:
    asked = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return int(asked) if asked.isdecimal() and int(asked) else _WAITING


def _resource(process: str, instance: str) -> Resource:
    own = {"service.name": f"cotrain-{process}", "service.instance.id": instance}
    own["service.version"] = __version__
    # A service name of the operator (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) takes precedence over ours.
    chosen = Resource.create()
    is_named = "OTEL_SERVICE_NAME" in os.environ or ("service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    if is_named:
        del own["service.name"]
    return chosen.merge(Resource(own))
