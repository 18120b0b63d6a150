"""Minimal server of sampling: it repeats the last prompt token, and records requests."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from typing_extensions import override

from cotrain.wire.codec import PROTOBUF
from cotrain.wire.proto import wire_pb2 as wire
from tests.support.fake_api import FakeApi


@dataclass
class FakeSampling(FakeApi):
    """Server that ends every sample at once, unless it is held."""

    batches: bool = False
    """True if clients should poll in batches."""
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Request id → body of the request."""
    cancelled: list[str] = field(default_factory=list)

    @override
    def _behave(self, endpoint: str, request: httpx.Request) -> httpx.Response:
        handlers: dict[str, Callable[[httpx.Request], Any]] = {
            "client": lambda _: {"sample_use_retrieve_futures": self.batches},
            "create_sampling_session": _new_sampler,
            "samplers": lambda r: {"sampler_id": r.url.path.split("/")[-1], "base_model": "m"},
            "save_weights_for_sampler": lambda r: {"request_id": f"save:{r.content.decode()}"},
            "asample": self._take_sample,
            "retrieve_futures": self._completions,
            "cancel_future": self._cancel,
        }
        if endpoint in handlers:
            return httpx.Response(200, json=handlers[endpoint](request))
        if endpoint == "retrieve_future":
            return self._result(request)
        return super()._behave(endpoint, request)

    def _take_sample(self, request: httpx.Request) -> dict[str, Any]:
        body = json.loads(request.content)
        request_id = f"{body['sampling_session_id']}:{body['seq_id']}"
        self.samples[request_id] = body
        ids = [f"{request_id}/{index}" for index in range(body["num_samples"])]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _result(self, request: httpx.Request) -> httpx.Response:
        request_id = json.loads(request.content)["request_id"]
        if request_id.startswith("save:"):
            return httpx.Response(200, json=_saved(json.loads(request_id.removeprefix("save:"))))
        if request_id in self.samples and not self._is_held(request_id):
            content = sample_response(self.samples[request_id]).SerializeToString()
            return httpx.Response(200, content=content, headers={"Content-Type": PROTOBUF})
        return super()._behave("retrieve_future", request)

    def _completions(self, request: httpx.Request) -> dict[str, Any]:
        """Return the samples that ended after the cursor, which is a position in the order of acceptance."""
        cursor = json.loads(request.content)["prev_cursor"]
        ended = [each for each in self.samples if not self._is_held(each)]
        return {
            "completions": [{"state": "finished", "request_id": each} for each in ended[cursor:]],
            "cursor": len(ended),
        }

    def _cancel(self, request: httpx.Request) -> dict[str, Any]:
        self.cancelled.append(json.loads(request.content)["request_id"])
        return {}

    def _is_held(self, request_id: str) -> bool:
        held = self.hold.get(request_id)
        return held is not None and not held.is_set()


def sample_response(body: dict[str, Any]) -> wire.SampleResponse:
    """Return a response whose sequences repeat the last prompt token `max_tokens` times."""
    prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
    count = body["sampling_params"].get("max_tokens", 1)
    message = wire.SampleResponse(prompt_cache_hit_tokens=len(prompt) - 1)
    for index in range(body["num_samples"]):
        message.sequences.add(
            stop_reason=wire.STOP_REASON_LENGTH,
            tokens=array("i", prompt[-1:] * count).tobytes(),
            logprobs=array("f", [-0.5 - index] * count).tobytes(),
        )
    if body.get("prompt_logprobs"):
        scores = [float("nan"), *(-1.0 for _ in prompt[1:])]
        message.prompt_logprobs = array("f", scores).tobytes()
    return message


def _new_sampler(request: httpx.Request) -> dict[str, Any]:
    body = json.loads(request.content)
    return {"sampling_session_id": f"s1:sample:{body['sampling_session_seq_id']}"}


def _saved(body: dict[str, Any]) -> dict[str, Any]:
    if "path" in body:
        return {"path": f"tinker://s1:train:0/sampler_weights/{body['path']}"}
    return {"path": None, "sampling_session_id": f"s1:sample:{body['sampling_session_seq_id']}"}
