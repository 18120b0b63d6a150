from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags, get_current_span
from typing_extensions import override

from cotrain_store.messages.ids import RunId
from cotrain_store.messages.ops import OpKind, QueuedOp
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.metrics import REGISTRIES
from cotrain_store.monitoring.otlp import BoundedProcessor, open_provider, stop
from cotrain_store.monitoring.traces import (
    TracingRefused,
    context_of,
    is_configured,
    named,
    record,
    trace_id,
    traceparent_of,
)
from tests.support.otlp_receiver import Receiver
from tests.support.processes import environment_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
CLIENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_tracing_is_off_without_an_address(environ: dict[str, str]) -> None:
    assert not is_configured(environ)


def test_an_address_for_traces_only_is_sufficient() -> None:
    assert is_configured({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://here/v1/traces"})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf alone"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "otlp, or none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "not an http address"),
    ],
)
def test_an_unsupported_setting_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(TracingRefused, match=said):
        is_configured({**ENDPOINT, **environ})


#: Traces without an address, then with one and without the extra.
TRACE_TWICE = f"""
import os, sys
import cotrain_scheduler.__main__
from cotrain_store.process_start import trace_or_refuse
trace_or_refuse("scheduler", "here")
ours = ("cotrain_store.monitoring.otlp", "opentelemetry.exporter", "opentelemetry.sdk.trace")
print([name for name in sys.modules if name.startswith(ours)])
os.environ |= {ENDPOINT}
sys.modules["opentelemetry.exporter"] = None
trace_or_refuse("scheduler", "here")
"""


def test_no_exporter_is_imported_without_tracing_and_none_there_is_refused_in_one_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TRACE_TWICE],
        env=environment_of({}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    imported, refusal = ran.stdout.splitlines()
    assert imported == "[]"
    assert "pip install 'cotrain[otel]'" in refusal
    assert "Traceback" not in ran.stderr


def test_spans_arrive_with_their_parents_links_and_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        for name, value in receiver.settings.items():
            monkeypatch.setenv(name, value)
        provider = open_provider("api", "here", decides=True)
        tracer = provider.get_tracer("cotrain")
        opened = tracer.start_span("POST /x", context_of(CLIENT))
        above = traceparent_of(opened)
        below = record(tracer, "cycle", 1.0, 2.0, above, links=[CLIENT, ""], cycle=3)
        described: dict[str, Any] = {"http.route": "/x", "tenant": "t", "run": None}
        opened.set_attributes(named(**described))
        opened.end()
        dropped_span = tracer.start_span("dropped", context_of(CLIENT[:-1] + "0"))
        assert traceparent_of(dropped_span) == ""
        stop(provider)
        request, cycle = sorted(receiver.spans, key=lambda span: span.name, reverse=False)
    assert (request.service, request.parent, request.trace) == ("cotrain-api", "cd" * 8, "ab" * 16)
    assert request.attributes == {"http.route": "/x", "cotrain.tenant": "t"}
    assert (cycle.parent, cycle.links) == (request.id, ("cd" * 8,))
    assert below == f"00-{cycle.trace}-{cycle.id}-01"
    assert (cycle.began, cycle.ended) == (10**9, 2 * 10**9)
    assert trace_id(below) == "ab" * 16


@pytest.mark.parametrize(
    "text",
    [
        "", "00", CLIENT.upper(), f"{CLIENT}0", f"ff{CLIENT[2:]}", CLIENT[:-1] + "0",
        f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'0' * 16}-01",
    ],
)  # fmt: skip
def test_an_invalid_or_unsampled_traceparent_has_no_span(text: str) -> None:
    assert traceparent_of(get_current_span(context_of(text))) == ""
    assert traceparent_of(get_current_span(context_of(CLIENT))) == CLIENT


@pytest.mark.parametrize("trace", ["", CLIENT])
@pytest.mark.parametrize("ref", ["inline", "spool:api-1.2:5:6"])
def test_the_record_of_an_op_has_its_trace_only_if_there_is_one(trace: str, ref: str) -> None:
    op = QueuedOp(RunId("r"), 3, OpKind.FORWARD, 7, ref, 9, 1795393741.25, trace)
    envelope = op.envelope()
    assert QueuedOp.parse(op.run, op.seq, envelope) == op
    assert envelope == f"forward|7|9|1795393741.25{trace and ';' + trace}|{ref}"
    assert len(envelope) - len(QueuedOp(*list(vars(op).values())[:7]).envelope()) in (0, 56)


class Stuck(SpanExporter):
    """Collector that accepts a message and does not answer."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = threading.Event()
        self.answer = SpanExportResult.SUCCESS

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.goes_on.wait()
        return self.answer


def dropped(reason: str) -> float:
    labels = {"reason": reason}
    name = "cotrain_worker_trace_spans_dropped_total"
    return REGISTRIES[Source.WORKER].get_sample_value(name, labels) or 0.0


def test_the_queue_for_a_stuck_collector_is_bounded_and_drops_are_counted() -> None:
    collector = Stuck()
    processor = BoundedProcessor(collector, 4, Source.WORKER)
    span = ReadableSpan("x", SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(1)))
    before = dropped("queue_full")
    for _ in range(10):
        processor.on_end(span)
    assert dropped("queue_full") - before == 6
    collector.goes_on.set()
    processor.force_flush()
    processor.on_end(span)
    assert dropped("queue_full") - before == 6
    before, collector.answer = dropped("not_sent"), SpanExportResult.FAILURE
    processor.force_flush()
    assert dropped("not_sent") - before == 1
    processor.shutdown()  # type: ignore[no-untyped-call]  # an untyped method of the library
