"""What happens to a run's requests, and when: at this end, and in the server's cycles."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from cotrain import AdamParams, Datum, Future, ServiceClient, TrainingClient


@dataclass
class Request:
    """One request on its way; times in seconds since the epoch."""

    op: str
    sent_at: float
    answered_at: float = 0.0


@dataclass(frozen=True)
class Cycle:
    """When the server was at work for this training."""

    number: int
    started_at: float
    ended_at: float


class Watched:
    """A run whose requests are written down, and whose batches take a while to prepare."""

    def __init__(self, run: TrainingClient, prepare_s: float) -> None:
        self._run, self._prepare_s = run, prepare_s
        self.requests: list[Request] = []

    def forward_backward(self, data: list[Datum], loss_fn: str) -> Answer:
        """Send a batch, when it is prepared."""
        time.sleep(self._prepare_s)
        return self._answer("forward_backward", lambda: self._run.forward_backward(data, loss_fn))

    def optim_step(self, adam: AdamParams) -> Answer:
        """Send a step."""
        return self._answer("optim_step", lambda: self._run.optim_step(adam))

    def _answer(self, op: str, send: Callable[[], Future[Any]]) -> Answer:
        self.requests.append(Request(op, time.time()))
        return Answer(send(), self.requests[-1])


@dataclass(frozen=True)
class Answer:
    """A future that writes down when its result was there."""

    future: Future[Any]
    request: Request

    def result(self) -> Any:
        """Wait for the result."""
        result = self.future.result()
        self.request.answered_at = time.time()
        return result


def cycles_of(service: ServiceClient, run: TrainingClient) -> list[Cycle]:
    """Read from the session's trace in which cycles it had a part."""
    session = run.model_id.partition(":")[0]
    url = service.create_rest_client().export_session_trace(session).result()
    return [
        Cycle(
            int(event["name"].removeprefix("cycle ")),
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
        )
        for event in httpx.get(url).raise_for_status().json()["traceEvents"]
        if event["name"].startswith("cycle ")
    ]
