"""Requests of a run against the clock cycles of the server: recorded, and drawn into a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cotrain import AdamParams, Datum, Future, ServiceClient, TrainingClient

COLORS = {"forward_backward": "tab:blue", "optim_step": "tab:orange"}
CYCLE = "0.75"
NARROWEST = 0.004
"""Share of the width that the shortest cycle is drawn with, so that it is visible."""


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


def draw(
    requests: Mapping[str, Sequence[Request]], cycles: Sequence[Cycle], title: str, path: Path, period_s: float | None
) -> None:
    """Write a PNG: a grey band with its number for each cycle, a bar with that of its step for each request.

    A bar ends when the loop reads the result, which may have arrived earlier.
    `period_s` is the metronome's period, whose ticks are dotted; None in eager mode.
    """
    # Imported here, because a laptop without it can still measure.
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(8, 1.7 * len(requests)), layout="constrained")
    rows = figure.subplots(len(requests), sharex=True)
    longest_s = max(each[-1].answered_at - each[0].sent_at for each in requests.values())
    for axes, (name, sent) in zip(rows, requests.items(), strict=True):
        _draw_cycles(axes, cycles, sent, NARROWEST * longest_s)
        _draw_requests(axes, sent)
        if period_s:
            _draw_ticks(axes, period_s, sent[0].sent_at, longest_s)
        axes.set(title=name, yticks=(), xlim=(-0.02 * longest_s, 1.02 * longest_s), ylim=(-0.6, 4))
        axes.spines[["left", "right", "top"]].set_visible(False)
    rows[-1].set_xlabel("seconds")
    figure.suptitle(title)
    bands = [Rectangle((0, 0), 1, 1, color=color) for color in (*COLORS.values(), CYCLE)]
    figure.legend(bands, [*COLORS, "clock cycle"], loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def _draw_requests(axes: Any, sent: Sequence[Request]) -> None:
    """Draw a step's requests one above the other, and every other step lower, as steps may overlap."""
    for index, request in enumerate(sent):
        step, is_second = divmod(index, 2)
        height = 2 * (1 - step % 2) + (0 if is_second else 0.8)
        took_s, start_s = request.answered_at - request.sent_at, request.sent_at - sent[0].sent_at
        axes.barh(height, took_s, left=start_s, height=0.7, color=COLORS[request.op])
        axes.text(
            start_s + took_s / 2, height, str(step + 1), ha="center", va="center", fontsize=7,
            color="white", clip_on=True,
        )  # fmt: skip


def _draw_cycles(axes: Any, cycles: Sequence[Cycle], sent: Sequence[Request], narrowest_s: float) -> None:
    for cycle in cycles:
        if sent[0].sent_at <= cycle.ended_at and cycle.started_at <= sent[-1].answered_at:
            start = cycle.started_at - sent[0].sent_at
            end = start + max(cycle.ended_at - cycle.started_at, narrowest_s)
            axes.axvspan(start, end, color=CYCLE, zorder=0)
            axes.text((start + end) / 2, 3.5, str(cycle.number), ha="center", fontsize=7)


def _draw_ticks(axes: Any, period_s: float, first_s: float, longest_s: float) -> None:
    """Dot every tick, used or not: they are multiples of the period."""
    offset_s = period_s - first_s % period_s
    for tick in range(int((longest_s - offset_s) / period_s) + 1):
        axes.axvline(offset_s + tick * period_s, color="0.4", linestyle=":", linewidth=1, zorder=0.5)
