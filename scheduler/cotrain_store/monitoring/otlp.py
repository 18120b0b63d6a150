"""Export of spans to a collector: the only module that needs the extra `otel`.

Spans are queued, and a thread sends many at once. If the queue is full, a span is dropped and counted. A slow
or unreachable collector therefore never delays the traced code.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
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


class BoundedProcessor(BatchSpanProcessor):
    """Batch processor of the library that also counts lost spans. The library drops them silently."""

    def __init__(self, exporter: SpanExporter, max_spans: int, source: Source) -> None:
        self._free = threading.Semaphore(max_spans)
        self._dropped = TRACE_SPANS_DROPPED[source]
        self._logged_at = -_LOGGED_EVERY_S
        super().__init__(
            _ReportingExporter(exporter, self._on_export),
            max_queue_size=max_spans,
            max_export_batch_size=max_spans if max_spans < _BATCH else None,
        )

    @override
    def on_end(self, span: ReadableSpan) -> None:
        """Queue a finished span."""
        if not span.context or not span.context.trace_flags.sampled:
            return
        if self._free.acquire(blocking=False):
            super().on_end(span)
        else:
            self._count_lost(1, "queue_full")

    def _on_export(self, count: int, *, is_sent: bool) -> None:
        self._free.release(count)
        if not is_sent:
            self._count_lost(count, "not_sent")

    def _count_lost(self, count: int, reason: str) -> None:
        self._dropped.labels(reason).inc(count)
        now = time.monotonic()
        if now - self._logged_at >= _LOGGED_EVERY_S:
            self._logged_at = now
            log.warning("spans_lost", reason=reason)


class _ReportingExporter(SpanExporter):
    """Exporter that reports how many spans have left the queue, and if they were sent."""

    def __init__(self, exporter: SpanExporter, report: Callable[..., None]) -> None:
        self._exporter = exporter
        self._report = report

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._report(len(spans), is_sent=result is SpanExportResult.SUCCESS)
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()


def _queue_size() -> int:
    asked = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    return int(asked) if asked.isdecimal() and int(asked) else _WAITING


def _resource(process: str, instance: str) -> Resource:
    own = {
        "service.name": f"cotrain-{process}", "service.instance.id": instance, "service.version": __version__,
    }  # fmt: skip
    # Attributes of the operator (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) take precedence over ours.
    return Resource.create(own).merge(OTELResourceDetector().detect())
