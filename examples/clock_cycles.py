"""One training, its loop written in three ways, and the clock cycles that each takes.

A server works in clock cycles. In metronome mode (`--mode metronome`), as in the hosted services, a
cycle starts on a tick, and a request that misses the tick waits for the next one. In eager mode
(`--mode eager`) a cycle starts as soon as a request is queued; while a loop waits, the server is
idle. In both modes the picture shows the waiting times. Real loops need time to prepare a batch;
`--prepare-s` sets this time.
"""

from __future__ import annotations

import time
from pathlib import Path

from clock_picture import Watched, cycles_of, draw
from demo_clock import ADAM, LOOPS
from demo_tenants import datum
from opening import FOLDER, counted, log, opened, options_of, show

from cotrain import Datum

STEPS = 5
PERIOD_S = 1.0
PREPARE_S = 0.1
TOKENS = 48
ROWS_BY_MODE = {"metronome": 8, "eager": 64}
"""Rows per batch.

In metronome mode a pass must take much less than a period, because a cycle cannot hold more. In
eager mode a pass should take longer than the preparation of the next batch.
"""


def main() -> None:
    """Run the loops, show the cost of a step in each, and draw the times of requests and cycles."""
    options = options_of(__doc__, STEPS, mode="metronome", period_s=PERIOD_S, prepare_s=PREPARE_S, picture="")
    period_s = options.period_s if options.mode == "metronome" else None
    clock = [f"--clock-mode={options.mode}", *([f"--clock-period-s={period_s}"] if period_s else [])]
    rows, requests = [], {}
    with opened(options, *clock) as (service, base_model):
        run = service.create_lora_training_client(base_model, rank=8, seed=1)
        data = [of_tokens(row) for row in range(ROWS_BY_MODE[options.mode])]
        for name, loop in counted("Running each loop", LOOPS.items(), len(LOOPS)):
            run.forward_backward(data, "cross_entropy")
            run.optim_step(ADAM).result()  # from here on, requests follow the ticks
            watched, started_at = Watched(run, options.prepare_s), time.monotonic()
            numbers = loop(watched, data, options.steps)  # cycle numbers of its passes
            took_s = time.monotonic() - started_at
            cycles = (numbers[-1] - numbers[0]) / max(1, options.steps - 1)
            rows.append((name, cycles, took_s / options.steps, took_s))
            requests[name] = watched.requests
        done = cycles_of(service, run)
    title = f"A training step, {options.mode}, {options.prepare_s:g} s to prepare a batch"
    show(title, ("loop", "cycles per step", "seconds per step", "seconds in all"), rows, options)
    path = Path(options.picture or FOLDER.parent / f"clock-{options.mode}.png")
    try:
        draw(requests, done, title, path, period_s)
        log.print(f"Drawn in {path}")
    except ModuleNotFoundError as error:
        log.print(f"No picture is drawn: pip install {error.name}")


def of_tokens(row: int) -> Datum:
    """Make a datum of arbitrary tokens: the duration of a pass does not depend on their values."""
    tokens = [100 + (7 * row + at) % 400 for at in range(TOKENS + 1)]
    return datum(tokens, weights=[1.0] * TOKENS)


if __name__ == "__main__":
    main()
