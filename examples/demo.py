"""See cotrain at work: `make demo`. No hub, no GPU, a few minutes on two cores.

A small base model is made and served; four tenants with keys, ranks, targets and losses of their own
train at once on four kinds of text; then a policy learns from its own samples. Ends with an error unless
each adapter is the best one for its own text, a loop that sends both requests of a step needs one clock
cycle where a naive one needs two, and the policy's reward has risen.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import demo_rl
from demo_clock import measure_loops
from demo_model import cached_model, tokenizer_of, write_on
from demo_rl import Learning, plot, reinforce
from demo_server import serving
from demo_tenants import TENANTS, Corpus, Progress, train
from demo_view import learning_table, loops_table, matrix_table, training_table
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from demo_clock import Cost

FOLDER = Path(__file__).parents[1] / ".demo" / "model"
PLOT = FOLDER.with_name("reward.png")
PERIOD_S = 1.0
REFRESH_S = 0.25
PROMPTS = ("def ", "The ", "Permission is ")
KEYS = [tenant.key for tenant in TENANTS]

console = Console()
if not console.is_terminal:
    console = Console(width=110)  # a log has no width of its own


def main() -> None:
    """Run the demo; exits with 1 if a claim is not met."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped, too
    started_at = time.monotonic()
    model = make_model()
    corpus = Corpus(tokenizer_of(model))
    progress = train_everybody(model, corpus)
    costs = measure_clock(model, corpus)
    learning = train_policy(model)
    broken = [
        *broken_claims_of_matrix(progress),
        *broken_claims_of_loops(costs),
        *broken_claims_of_policy(learning),
    ]
    for claim in broken:
        console.print(f"[bold red]Not met:[/] {claim}")
    console.print(f"{time.monotonic() - started_at:.0f} s in all.")
    sys.exit(1 if broken else 0)


def make_model() -> Path:
    """Make the base model, or take the one made before, and let it write a line or two."""
    columns = (TextColumn("Making a base model"), BarColumn(), TextColumn("{task.fields[loss]}"))
    with ProgressBar(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("", loss="")
        model = cached_model(
            FOLDER,
            lambda step, steps, loss: bar.update(
                task, completed=step, total=steps, loss=f"{loss:.2f} nats/token"
            ),
        )
        bar.update(task, completed=1, total=1)
    for prompt in PROMPTS:
        console.print(f"[dim]{write_on(model, prompt, 40)!r}[/]", highlight=False, markup=True)
    return model


def train_everybody(model: Path, corpus: Corpus) -> list[Progress]:
    """Serve the model and let all tenants train at once, in sight."""
    progress, leaving = [Progress() for _ in TENANTS], threading.Event()
    with serving(model, KEYS) as address, ThreadPoolExecutor(len(TENANTS)) as threads:
        console.print(f"cotrain serves at {address}")
        work = [
            threads.submit(train, tenant, address, str(model), corpus, now, leaving)
            for tenant, now in zip(TENANTS, progress, strict=True)
        ]
        try:
            watch(progress, work)
        finally:
            leaving.set()
    console.print()
    console.print(matrix_table(progress))
    return progress


def watch(progress: Sequence[Progress], work: Sequence[Future[None]]) -> None:
    """Show the live table until all work is done; raises what a tenant's work raised."""
    with Live(training_table(progress), console=console, auto_refresh=False) as live:
        while not all(each.done() for each in work):
            time.sleep(REFRESH_S)
            live.update(training_table(progress), refresh=True)
    for each in work:
        each.result()


def measure_clock(model: Path, corpus: Corpus) -> dict[str, Cost]:
    """Serve the model under a metronome and count cycles."""
    options = ("--clock-mode=metronome", f"--clock-period-s={PERIOD_S}")
    with serving(model, KEYS[:1], *options) as address:
        costs = measure_loops(address, str(model), corpus)
    console.print(loops_table(costs, PERIOD_S))
    return costs


def train_policy(model: Path) -> Learning:
    """Serve the model and let a policy learn from its own samples, in sight."""
    console.print()
    with (
        serving(model, [demo_rl.KEY]) as address,
        Live(learning_table(Learning()), console=console, auto_refresh=False) as live,
    ):
        learning = reinforce(
            address, str(model), lambda now: live.update(learning_table(now), refresh=True)
        )
    plot(learning, PLOT)
    console.print()
    console.print(
        f"Mean reward {learning.at_first:.2f} at first, {learning.at_last:.2f} at last, "
        f"in {learning.seconds:.0f} s; drawn in {PLOT}",
        highlight=False,
        soft_wrap=True,
    )
    return learning


def broken_claims_of_matrix(progress: Sequence[Progress]) -> Iterator[str]:
    """Each adapter learned its text, and better than every other adapter did."""
    for tenant, its in zip(TENANTS, progress, strict=True):
        kind = tenant.kind
        if its.after[kind] >= its.before[kind]:
            yield f"{tenant.name}'s adapter has learned {kind}"
        if its.after[kind] > min(other.after[kind] for other in progress):
            yield f"{tenant.name}'s adapter is the best one for {kind}"


def broken_claims_of_loops(costs: Mapping[str, Cost]) -> Iterator[str]:
    """Sending both requests of a step saves at least one cycle of two."""
    if costs["naive"].cycles < 2:
        yield "a naive loop takes two cycles per step"
    for name in ("submit both", "pipelined"):
        if costs[name].cycles != 1:
            yield f"the loop '{name}' takes one cycle per step"


def broken_claims_of_policy(learning: Learning) -> Iterator[str]:
    """The policy answers better than it did."""
    if learning.at_last < learning.at_first + demo_rl.MARGIN:
        yield f"the policy's mean reward has risen by {demo_rl.MARGIN}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
