"""Sweep of learning rates: every rate has an adapter, and all adapters share each pass.

Each batch is sent once for all runs, and they share clock cycles. So the server reads the base model's
weights once for all of them. The line below the table shows the time saved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from how_far import reported
from opening import log, opened, options_of, show
from unicode_names import batch, datums, holdout

from cotrain import ServiceClient

STEPS = 16
RANK, ROWS = 8, 4
RATES = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Outcome:
    """Result of one learning rate, in nats per token."""

    rate: float
    first: float
    """Loss of the first step."""
    holdout: float
    """Held-out loss after the last step."""


def main() -> None:
    """Train one adapter per learning rate. Show the best rate and the duration of the sweep."""
    options = options_of(__doc__, STEPS)
    with opened(options) as (service, base_model):
        _, alone_s = asyncio.run(sweep(service, base_model, RATES[:1], options.steps))
        outcomes, together_s = asyncio.run(sweep(service, base_model, RATES, options.steps))
    best = min(outcomes, key=lambda outcome: outcome.holdout)
    rows = [(f"{each.rate:g}", each.first, each.holdout, "best" if each is best else "") for each in outcomes]
    show("Nats per token by learning rate", ("rate", "first step", "held out, after", ""), rows, options)
    if not options.json:
        print(f"{len(RATES)} runs at once took {together_s:.1f} s. One alone took {alone_s:.1f} s,")
        print(f"so one after the other they would take {len(RATES) * alone_s:.1f} s.")


async def sweep(
    service: ServiceClient, base_model: str, rates: Sequence[float], steps: int
) -> tuple[list[Outcome], float]:
    """Train at all rates at once.

    Return the outcome of each and the seconds from first to last step.
    """
    made = await service.create_sweep_async(
        base_model, [{"lr": rate, "rank": RANK, "seed": 1, "eps": 1e-8} for rate in rates]
    )
    tokenizer = await asyncio.to_thread(made.trials[0].run.get_tokenizer)
    batches = [datums(tokenizer, batch(step, ROWS)) for step in range(steps)]
    unseen = datums(tokenizer, holdout())
    started_at = time.monotonic()
    with reported(f"Training at {len(rates)} learning rates at once", log) as report:
        sent = [await made.train_async(data) for data in batches]
        tested = await made.evaluate_async(unseen)
        for done, future in enumerate(sent, 1):
            await future
            report(done, len(sent), "")
        await tested
    outcomes = [Outcome(trial.adam.learning_rate, trial.losses[0], trial.score) for trial in made.trials]
    return outcomes, time.monotonic() - started_at


if __name__ == "__main__":
    main()
