"""Collector of traces: OTLP over HTTP, in protobuf, stored in a list."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typing_extensions import override

from tests.support.local_server import Handler, LocalServer

PATIENCE_S = 300


@dataclass(frozen=True)
class Received:
    """Received span."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    """Ids of the linked spans."""
    began: int
    ended: int
    is_error: bool
    attributes: dict[str, Any]


class Receiver(LocalServer):
    """Collector of spans that answers every export with `status`."""

    def __init__(self, status: int = 200) -> None:
        receiver = self
        self.spans: list[Received] = []

        class Collector(Handler):
            @override
            def respond(self) -> None:
                body = self.body()
                receiver.spans += read_spans(body) if self.path == "/v1/traces" else []
                self.answer(status)

        super().__init__(Collector)
        self.settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": self.address, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def wait_for(self, is_enough: Callable[[list[Received]], object]) -> list[Received]:
        """Wait until enough spans have arrived. Return those that arrived until then."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_enough(self.spans):
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.02)
        return list(self.spans)


def read_spans(body: bytes) -> list[Received]:
    """Return the spans of one message."""
    found = []
    for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _values(of_process.resource.attributes)["service.name"]
        for of_scope in of_process.scope_spans:
            found += [
                Received(
                    service, span.name, span.trace_id.hex(), span.span_id.hex(),
                    span.parent_span_id.hex(), tuple(link.span_id.hex() for link in span.links),
                    span.start_time_unix_nano, span.end_time_unix_nano, span.status.code == 2,
                    _values(span.attributes),
                )
                for span in of_scope.spans
            ]  # fmt: skip
    return found


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
