"""Spans of a committed cycle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext

from cotrain_store.messages.ids import RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.monitoring.traces import traceparent_of
from cotrain_workers.engine.ops import CycleOutput, CyclePart, Failure, Output, PassProgress, StepOutput
from cotrain_workers.results import StepCommit, StepRun, op_rows
from cotrain_workers.worker.cycle_log import bound_to_cycle, trace_cycle
from cotrain_workers.worker.device_time import CycleTimes, DeviceTime

A, B = RunId("a"), RunId("b")
PLAN, FIRST, SECOND, OTHER = (f"00-{'ab' * 16}-{n * 16}-01" for n in "1234")
STEP = Step(
    cycle=4,
    worker=WorkerId("w0"),
    ops=(
        QueuedOp(A, 1, OpKind.FORWARD_BACKWARD, 30, "inline", 1, 90.0, FIRST),
        QueuedOp(A, 2, OpKind.OPTIM_STEP, 0, "inline", 1, 91.0, SECOND),
        QueuedOp(B, 1, OpKind.FORWARD_BACKWARD, 12, "inline", 1, 92.0, OTHER),
    ),
    planned_at=100.0,
    tenant_by_run={A: TenantId("t"), B: TenantId("u")},
    trace=PLAN,
)
NOTHING = StepCommit(
    rows=(), results={}, record={}, counted={}, crashed=frozenset(), saves={}, usage={}, opened={},
    ended=(), history={}, is_exact=True,
)  # fmt: skip


class Spans(InMemorySpanExporter):
    """Collector of spans in memory."""

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.get_finished_spans() if span.name == name]


def id_of(context: SpanContext | None) -> str:
    """Return the name of a span for other processes."""
    assert context is not None
    return traceparent_of(NonRecordingSpan(context))


def links_of(span: ReadableSpan) -> list[str]:
    return [id_of(link.context) for link in span.links]


def facts_of(span: ReadableSpan, *names: str) -> list[Any]:
    assert span.attributes is not None
    return [span.attributes.get(f"cotrain.{name}") for name in names]


def spans_of(
    step: Step,
    outputs: Mapping[tuple[str, int], Output],
    divided: Mapping[tuple[str, int], PassProgress] | None = None,
    *,
    is_whole: bool = True,
) -> Spans:
    parts = (CyclePart("wave", 101.0, 102.0), CyclePart("optim", 102.0, 103.0))
    cost = CycleOutput(outputs, 1, 42, 64, 0.5, 0.25, divided=divided or {}, parts=parts)
    record = {"outcome": "ok", "runs": [], "tokens": 42, "sampling_ms": None}
    ran = StepRun(outputs, cost if is_whole else None, is_exact=True)
    rows = op_rows(step, {op.id: b"" for op in step.ops}, ran, 1.0)
    commit = replace(NOTHING, rows=rows, record=record)
    times, spans, provider = CycleTimes(DeviceTime()), Spans(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    for name in ("restore", "read_bodies", "run", "commit"):
        times.note(name)
    trace_cycle(provider.get_tracer("test"), step, ran.cost, commit, times, crashes=1)
    return spans


DONE: dict[tuple[str, int], Output] = {
    (A, 1): Failure("Loss is not finite.", "user", "not_finite"),
    (A, 2): StepOutput(0.5),
    (B, 1): StepOutput(0.5),
}


def test_a_cycle_is_a_child_of_its_plan_and_linked_with_its_ops() -> None:
    spans = spans_of(STEP, DONE)
    [cycle] = spans.named("cycle")
    assert (id_of(cycle.parent), links_of(cycle)) == (PLAN, [FIRST, SECOND, OTHER])
    assert facts_of(cycle, "cycle", "crashes", "tokens") == [4, 1, 42]
    everything = spans.get_finished_spans()
    below = [span.name for span in everything if id_of(span.parent) == id_of(cycle.context)]
    assert below == ["restore", "read_bodies", "commit", "wave", "optim"]
    first, other = spans.named("forward_backward")
    assert (id_of(first.parent), first.start_time) == (FIRST, 90 * 10**9)
    assert links_of(first) == [id_of(cycle.context)]
    assert facts_of(first, "failure", "waited_s") == ["user", 10.0]
    assert facts_of(other, "failure", "tenant") == [None, "u"]
    assert [first.status.is_ok, other.status.is_ok] == [False, True]
    assert "finite" not in str([span.to_json() for span in everything])


def test_an_open_pass_is_linked_without_a_span_and_later_ops_are_not() -> None:
    spans = spans_of(STEP, {(B, 1): StepOutput(0.5)}, {(A, 1): PassProgress(10, 10)})
    [cycle] = spans.named("cycle")
    assert links_of(cycle) == [FIRST, OTHER]
    assert [id_of(span.parent) for span in spans.named("forward_backward")] == [OTHER]
    assert spans.named("optim_step") == []


def test_a_cycle_run_in_groups_has_one_part_for_them() -> None:
    names = [span.name for span in spans_of(STEP, DONE, is_whole=False).get_finished_spans()]
    assert "run" in names
    assert "wave" not in names


def test_untraced_ops_have_no_span() -> None:
    untraced = replace(STEP, ops=tuple(replace(op, trace="") for op in STEP.ops))
    assert spans_of(untraced, DONE).get_finished_spans() == ()


def test_short_visits_of_the_decoder_do_not_count_as_sampling() -> None:
    times = CycleTimes(DeviceTime())
    times.visited(lambda: None)()
    assert [part.name for part in times.parts(None)] == []


def test_log_lines_have_the_cycle_and_its_trace() -> None:
    with bound_to_cycle(STEP):
        assert structlog.contextvars.get_contextvars() == {"cycle": 4, "trace_id": "ab" * 16}
    with bound_to_cycle(replace(STEP, trace="")):
        assert structlog.contextvars.get_contextvars() == {"cycle": 4}
    assert structlog.contextvars.get_contextvars() == {}
