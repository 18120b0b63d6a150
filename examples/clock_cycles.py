"""The clock made visible: one training, its loop written in three ways, and the cycles each takes.

A server does its work in clock cycles. Under a metronome, as at the hosted services, a cycle starts on a
beat, and a request that misses it waits for the next one: `--mode metronome`. An eager server starts when
there is work; a loop that waits leaves it idle then: `--mode eager`. Either way the picture shows who
waited for whom. Preparing a batch takes time in any real loop; `--prepare-s` says how much it takes here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import sft
from clock_picture import draw
from demo_clock import LOOPS
from opening import FOLDER, opened, options_of, show
from unicode_names import batch, datums

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain import AdamParams, Datum, Future, ServiceClient, TrainingClient

STEPS = 5
PERIOD_S = 1.0
PREPARE_S = 0.1
ROWS = 32


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


def main() -> None:
    """Run the loops, show what a step took in each, and draw when what was sent and done."""
    options = options_of(
        __doc__, STEPS, mode="metronome", period_s=PERIOD_S, prepare_s=PREPARE_S, picture=""
    )
    serve_options = (f"--clock-mode={options.mode}", f"--clock-period-s={options.period_s}")
    rows, requests = [], {}
    with opened(options, *serve_options) as (service, base_model):
        run = service.create_lora_training_client(base_model, rank=8, seed=1)
        data = datums(run.get_tokenizer(), batch(0, ROWS))
        for name, loop in LOOPS.items():
            run.forward_backward(data, "cross_entropy")
            run.optim_step(sft.ADAM).result()  # from here on we move with the beat
            watched, started_at = Watched(run, options.prepare_s), time.monotonic()
            numbers: list[float] = loop(watched, data, options.steps)  # cycles of the passes
            took_s = time.monotonic() - started_at
            cycles = (numbers[-1] - numbers[0]) / max(1, options.steps - 1)
            rows.append((name, cycles, took_s / options.steps, took_s))
            requests[name] = watched.requests
        done = cycles_of(service, run)
    title = f"A training step, {options.mode}, {options.prepare_s:g} s to prepare a batch"
    show(title, ("loop", "cycles per step", "seconds per step", "seconds in all"), rows, options)
    path = Path(options.picture or FOLDER.parent / f"clock_cycles_{options.mode}.png")
    beat_s = options.period_s if options.mode == "metronome" else None
    draw(requests, done, title, path, beat_s)
    if not options.json:
        print(f"Drawn in {path}")


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


if __name__ == "__main__":
    main()
