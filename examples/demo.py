"""Demonstration of cotrain: `make demo`. No hub, no GPU, three minutes on two cores.

The demo trains and serves a small base model. Four tenants with different keys, ranks, targets and
losses train concurrently on four kinds of text. A policy learns from its own samples. One training
loop is written in three ways.

The demo exits with an error unless all of these hold:

* Each adapter is the best one for its own text.
* The policy's reward has risen.
* A loop that sends both requests of a step together takes one clock cycle; a naive loop takes two.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import demo_rl
from demo_clock import Cost, measure_loops
from demo_rl import Learning, plot, reinforce
from demo_server import ADMIN_KEY, GIVE_WAY, serving
from demo_tenants import STEPS, TENANTS, Corpus, Progress, train
from demo_view import learning_table, loops_table, matrix_table, training_table
from how_far import Report, reported
from rich.console import Console
from rich.live import Live
from rich.table import Table

FOLDER = Path(__file__).parents[1] / ".demo" / "model"
PLOT = FOLDER.with_name("reward.png")
PERIOD_S = 1.0
REFRESH_S = 0.25
PROMPTS = ("def ", "The ", "Permission is ")
KEYS = [tenant.key for tenant in TENANTS]

console = Console()
if not console.is_terminal:
    console = Console(width=110)  # a log has no terminal width


def main() -> None:
    """Run the demo. Exit with 1 if a claim does not hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the server, too
    started_at = time.monotonic()
    model, corpus = make_model()
    console.print("\nServing it to four tenants and a policy", style="bold")
    with serving(model, [*KEYS, demo_rl.KEY], say=say) as address:
        say(f"While it trains, open {address}/ui and log in with the operator's key {ADMIN_KEY}")
        progress = train_everybody(address, model, corpus)
        learning = train_policy(address, model)
    costs = measure_clock(model, corpus)
    broken = [*broken_claims_of_matrix(progress), *broken_claims_of_policy(learning), *broken_claims_of_loops(costs)]
    for claim in broken:
        console.print(f"[bold red]Not met:[/] {claim}")
    console.print(f"{time.monotonic() - started_at:.0f} s in all.")
    console.print("Next: docs/get-started/quickstart.md")
    sys.exit(1 if broken else 0)


def make_model() -> tuple[Path, Corpus]:
    """Make the base model or reuse the previous one, and print a sample of its text."""
    console.print("Making a base model", style="bold")
    with reported("Loading torch and reading text", console):
        # Imported here, because the import takes seconds and the progress line should appear first.
        os.environ.setdefault(*GIVE_WAY)
        from demo_model import cached_model, tokenizer_of, write_on
    with reported("Training it", console) as report:
        model = cached_model(FOLDER, lambda step, steps, loss: report(step, steps, f"{loss:.2f} nats/token"))
    for prompt in PROMPTS:
        say(repr(write_on(model, prompt, 40)))
    return model, Corpus(tokenizer_of(model))


def train_everybody(address: str, model: Path, corpus: Corpus) -> list[Progress]:
    """Train all tenants concurrently and show a live table."""
    progress, leaving = [Progress() for _ in TENANTS], threading.Event()
    with ThreadPoolExecutor(len(TENANTS)) as threads:
        work = [
            threads.submit(train, tenant, address, str(model), corpus, now, leaving)
            for tenant, now in zip(TENANTS, progress, strict=True)
        ]
        try:
            watch(progress, work)
        finally:
            leaving.set()
    console.print(matrix_table(progress))
    return progress


def watch(progress: Sequence[Progress], work: Sequence[Future[None]]) -> None:
    """Show the progress of all tenants until they are done. Raise the error of a failed tenant."""
    with showing("Training four tenants at once", lambda: training_table(progress)) as show:
        while not all(each.done() for each in work):
            time.sleep(REFRESH_S)
            show(sum(its.step for its in progress), STEPS * len(progress), "")
    for each in work:
        each.result()


def train_policy(address: str, model: Path) -> Learning:
    """Train a policy on its own samples and show a live table."""
    learning = Learning()
    with showing("Training a policy by its rewards", lambda: learning_table(learning)) as show:
        reinforce(
            address,
            str(model),
            learning,
            lambda: show(len(learning.rewards), demo_rl.STEPS, f"reward {learning.rewards[-1]:.2f}"),
        )
    plot(learning, PLOT)
    console.print(
        f"Mean reward {learning.at_first:.2f} at first, {learning.at_last:.2f} at last, "
        f"in {learning.seconds:.0f} s; drawn in {PLOT}",
        highlight=False,
        soft_wrap=True,
    )
    return learning


def measure_clock(model: Path, corpus: Corpus) -> dict[str, Cost]:
    """Serve the model in metronome mode and count cycles."""
    console.print(f"\nServing it under a metronome of {PERIOD_S:g} s", style="bold")
    options = ("--clock-mode=metronome", f"--clock-period-s={PERIOD_S}")
    with (
        serving(model, KEYS[:1], *options, say=say) as address,
        reported("Running a training loop, written in three ways", console) as report,
    ):
        costs = measure_loops(address, str(model), corpus, report)
    console.print(loops_table(costs, PERIOD_S))
    return costs


def say(line: str) -> None:
    """Print a line of another program, such as the server."""
    console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def showing(doing: str, table: Callable[[], Table]) -> Iterator[Report]:
    """Print the current activity and yield a progress reporter: a live table, or lines of a log."""
    if not console.is_terminal:
        with reported(doing, console) as report:
            yield report
        console.print(table())
        return
    with Live(table(), console=console, auto_refresh=False) as live:
        yield lambda *_: live.update(table(), refresh=True)


def broken_claims_of_matrix(progress: Sequence[Progress]) -> Iterator[str]:
    """Yield claims that fail: each adapter is the best one for its own text."""
    for tenant, its in zip(TENANTS, progress, strict=True):
        kind = tenant.kind
        if its.after[kind] >= its.before[kind]:
            yield f"{tenant.name}'s adapter has learned {kind}"
        if its.after[kind] > min(other.after[kind] for other in progress):
            yield f"{tenant.name}'s adapter is the best one for {kind}"


def broken_claims_of_loops(costs: Mapping[str, Cost]) -> Iterator[str]:
    """Yield claims that fail: sending both requests of a step saves at least one of two cycles."""
    if costs["naive"].cycles < 2:
        yield "a naive loop takes two cycles per step"
    for name in ("submit both", "pipelined"):
        if costs[name].cycles != 1:
            yield f"the loop '{name}' takes one cycle per step"


def broken_claims_of_policy(learning: Learning) -> Iterator[str]:
    """Yield claims that fail: the policy's reward has risen."""
    if learning.at_last < learning.at_first + demo_rl.MARGIN:
        yield f"the policy's mean reward has risen by {demo_rl.MARGIN}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
