"""Times of a run's requests, in the client and in the cycles of the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from cotrain import AdamParams, Datum, Future, ServiceClient, TrainingClient


@dataclass
class Request:
    """A request in flight; times in seconds since the epoch."""

    op: str
    sent_at: float
    answered_at: float = 0.0


@dataclass(frozen=True)
class Cycle:
    """Start and end of a cycle that included this training."""

    number: int
    started_at: float
    ended_at: float


class Watched:
    """A run that records its requests and takes some time to prepare each batch."""

    def __init__(self, run: TrainingClient, prepare_s: float) -> None:
        self._run, self._prepare_s = run, prepare_s
        self.requests: list[Request] = []

    def forward_backward(self, data: list[Datum], loss_fn: str) -> Answer:
        """Prepare a batch, then send it."""
        time.sleep(self._prepare_s)
        return self._answer("forward_backward", lambda: self._run.forward_backward(data, loss_fn))

    def optim_step(self, adam: AdamParams) -> Answer:
        """Send an optimizer step."""
        return self._answer("optim_step", lambda: self._run.optim_step(adam))

    def _answer(self, op: str, send: Callable[[], Future[Any]]) -> Answer:
        self.requests.append(Request(op, time.time()))
        return Answer(send(), self.requests[-1])


@dataclass(frozen=True)
class Answer:
    """A future that records when its result arrives."""

    future: Future[Any]
    request: Request

    def result(self) -> Any:
        """Wait for the result."""
        result = self.future.result()
        self.request.answered_at = time.time()
        return result


def cycles_of(service: ServiceClient, run: TrainingClient) -> list[Cycle]:
    """Return the cycles that included the run, read from the session's trace."""
    session = run.model_id.partition(":")[0]
    url = service.create_rest_client().export_session_trace(session).result()
    return [
        Cycle(int(event["name"].removeprefix("cycle ")), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in httpx.get(url).raise_for_status().json()["traceEvents"]
        if event["name"].startswith("cycle ")
    ]
