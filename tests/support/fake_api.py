"""Minimal server of the training protocol: it answers and records requests, and trains nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from cotrain.wire.codec import PROTOBUF
from cotrain.wire.proto import wire_pb2 as wire

Answer = httpx.Response | Exception


@dataclass
class FakeApi:
    """Server that resolves every request at once. `answers` come before its own."""

    calls: list[httpx.Request] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Endpoint → first answers to it. An exception is a broken connection."""
    hold: dict[str, threading.Event] = field(default_factory=dict)
    """Request id → event until which its result is pending."""
    passes: dict[str, wire.ForwardBackwardRequest] = field(default_factory=dict)
    """Request id → pass of the request."""

    @property
    def network(self) -> httpx.MockTransport:
        """Return a transport that replaces the network of a client."""
        return httpx.MockTransport(self._answer)

    def paths(self) -> list[str]:
        """Return every endpoint called so far, in order."""
        return [call.url.path.removeprefix("/api/v1/") for call in self.calls]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Return the decoded JSON of every call of one endpoint."""
        return [json.loads(c.content) for c in self.calls if c.url.path == f"/api/v1/{path}"]

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request)
        path = request.url.path.removeprefix("/api/v1/")
        if prepared := self.answers.get(path):
            answer = prepared.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        return self._behave(path.partition("/")[0], request)

    def _behave(self, endpoint: str, request: httpx.Request) -> httpx.Response:
        handlers: dict[str, Callable[[httpx.Request], httpx.Response]] = {
            "client": lambda _: _json({}),
            "create_session": lambda _: _json({"session_id": "s1"}),
            "session_heartbeat": lambda _: _json({"type": "session_heartbeat"}),
            "sessions": lambda _: _json({}),
            "get_server_capabilities": lambda _: _json({"supported_models": [{"model_name": "m"}]}),
            "get_info": lambda _: _json({"model_data": {"model_name": "m"}, "model_id": "s1:train:0"}),
            "create_model": lambda _: _json({"request_id": "create"}),
            "unload_model": lambda _: _json({"request_id": "unload"}),
            "optim_step": lambda r: _json({"request_id": f"step:{json.loads(r.content)['seq_id']}"}),
            "forward_backward": self._take_pass,
            "retrieve_future": self._retrieve,
        }
        return handlers[endpoint](request)

    def _take_pass(self, request: httpx.Request) -> httpx.Response:
        message = wire.ForwardBackwardRequest.FromString(request.content)
        request_id = f"pass:{message.seq_id}"
        self.passes[request_id] = message
        return _json({"request_id": request_id})

    def _retrieve(self, request: httpx.Request) -> httpx.Response:
        request_id = json.loads(request.content)["request_id"]
        held = self.hold.get(request_id)
        if held is not None and not held.is_set():
            return pending(request_id)
        if request_id.startswith("pass"):
            return protobuf(pass_output(self.passes[request_id]))
        results = {"create": {"model_id": "s1:train:0"}, "unload": {"model_id": "s1:train:0"}}
        return _json(results.get(request_id, {"metrics": {"grad_norm": 1.0}}))


def pass_output(request: wire.ForwardBackwardRequest) -> wire.ForwardBackwardOutput:
    """Return the result of a pass: per datum its number of chunks, and the number of datums as its loss."""
    output = wire.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", metrics={"loss:sum": len(request.data), "clock_cycle:unique": request.seq_id}
    )
    record = output.loss_fn_outputs.add(num_datums=len(request.data))
    field = record.fields["logprobs"]
    field.dtype = wire.DTYPE_FLOAT32
    field.data = b"".join(datum.model_input[0].encoded_text.tokens for datum in request.data)
    field.offsets = b"".join((4 * i).to_bytes(8, "little") for i in range(len(request.data) + 1))
    return output


def protobuf(message: wire.ForwardBackwardOutput) -> httpx.Response:
    """Return a response with a message."""
    return httpx.Response(200, content=message.SerializeToString(), headers={"Content-Type": PROTOBUF})


def pending(request_id: str) -> httpx.Response:
    """Return the response for a pending result."""
    return _json({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)


def refusal(status: int, detail: str = "no", **headers: str) -> httpx.Response:
    """Return a refusal."""
    return httpx.Response(status, json={"detail": detail}, headers=headers)


def _json(value: dict[str, Any], status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=value)
