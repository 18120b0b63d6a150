"""`cotrain replay` and `cotrain recorder …`: run a recorded cycle again, list them, hand one out."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cotrain_store.messages.ids import RunId
    from cotrain_workers.engine import Engine
    from cotrain_workers.recorded_cycle import CycleFacts, RecordedCycle
    from cotrain_workers.replay import Compared

# Whoever lacks it is told by `cotrain` what to install. It is imported where a command needs it:
# that takes seconds, and every `cotrain` loads this module.
if find_spec("torch") is None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")

recorder = typer.Typer(help="List recorded cycles, and hand one out.", no_args_is_help=True)
# Without emoji: `:train:` in the name of a run is one.
console = Console(highlight=False, soft_wrap=True, emoji=False)

DEFAULT_DATA_DIR = Path.home() / ".cotrain"  # as `cotrain serve` has it
#: Exit codes of `replay`, beside 0.
DIVERGED, UNUSABLE = 1, 2

Recording = Annotated[Path, typer.Argument(help="A file below <data>/recorder.", exists=True)]


def replay(
    file: Recording,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id or folder; by default what the recording worker had."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default as recorded, where it is there.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also run what failed by an accident.")
    ] = False,
) -> None:
    """Run one recorded cycle again, without a server, and compare every result and state."""
    from cotrain_workers.recording_file import RecordingUnreadable, read_cycle
    from cotrain_workers.replay import (
        compared,
        engine_for,
        restore_before,
        run_again,
        tolerance_of,
    )

    try:
        cycle = read_cycle(file)
        engine = engine_for(cycle.facts, base_model, device)
        restore_before(engine, cycle)
    except (RecordingUnreadable, OSError, ValueError) as unusable:
        typer.echo(str(unusable), err=True)
        raise typer.Exit(UNUSABLE) from unusable
    _tell(cycle, engine)
    again = run_again(engine, cycle, everything=everything)
    rows = list(compared(cycle, again, tolerance_of(cycle.facts.numerics, engine.facts.numerics)))
    _show(_comparison(rows))
    diverged = sum(row.verdict == "DIVERGED" for row in rows)
    if diverged:
        console.print(f"{diverged} of {len(rows)} diverged.")
        raise typer.Exit(DIVERGED)
    console.print("Nothing to compare with." if cycle.found is None else "Nothing diverged.")


@recorder.command(name="list")
def list_recordings(
    data_dir: Annotated[
        Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Where the server keeps everything.")
    ] = DEFAULT_DATA_DIR,
) -> None:
    """List the recorded cycles of all workers, the newest first."""
    from cotrain_workers.recorder import SUFFIX
    from cotrain_workers.recording_file import RecordingUnreadable, read_facts

    table = Table("file", "recorded", "worker", "cycle", "runs", "ops", "size", box=None)
    files = (data_dir / "recorder").glob(f"*/*/*{SUFFIX}")
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            table.add_row(escape(str(path)), *_listed(read_facts(path), path.stat().st_size))
        except RecordingUnreadable:
            table.add_row(escape(str(path)), "damaged")
    _show(table)


@recorder.command()
def export(
    file: Recording,
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    run: Annotated[
        str | None, typer.Option(help="This run alone, nothing of other tenants.")
    ] = None,
) -> None:
    """Write a recorded cycle, or one run of it, to a file of its own."""
    from cotrain_store.messages.ids import RunId
    from cotrain_workers.recorded_cycle import only_run
    from cotrain_workers.recording_file import RecordingUnreadable, read_cycle, write_cycle

    try:
        cycle = read_cycle(file)
        if run is not None:
            cycle = only_run(_with_run(cycle, RunId(run)), RunId(run))
        write_cycle(output, cycle)
    except (RecordingUnreadable, OSError, ValueError) as unusable:
        typer.echo(str(unusable), err=True)
        raise typer.Exit(UNUSABLE) from unusable


def _with_run(cycle: RecordedCycle, run: RunId) -> RecordedCycle:
    if run not in cycle.facts.step.tenant_by_run:
        raise ValueError(f"Run {run} is not in this cycle.")
    return cycle


def _tell(cycle: RecordedCycle, engine: Engine) -> None:
    """Say what is run again, and how it is compared."""
    facts = cycle.facts
    recorded, worker, number, runs, ops = _listed(facts, 0)[:5]
    console.print(
        f"Cycle {number} of {facts.base_model} on {worker}, {recorded}: {runs} runs, {ops} ops."
    )
    others = facts.numerics.differences(engine.facts.numerics)
    if others:
        console.print(f"Other numerics ({'; '.join(others)}): compared with a tolerance.")
    elif facts.numerics.device != "cpu":
        console.print("Not on a CPU: compared with a tolerance.")
    if cycle.found is None:
        console.print("It has no outcome: its process died in this cycle.")


def _listed(facts: CycleFacts, size: int) -> tuple[str, ...]:
    recorded = datetime.fromtimestamp(facts.recorded_at, UTC)
    step = facts.step
    counts = (step.cycle, len(step.tenant_by_run), len(step.ops))
    cycle, runs, ops = (str(count) for count in counts)
    return f"{recorded:%Y-%m-%d %H:%M:%S}", step.worker, cycle, runs, ops, decimal(size)


def _comparison(rows: Iterable[Compared]) -> Table:
    table = Table("run", "seq", "what", "digest", "", "", box=None)
    for row in rows:
        seq = "" if row.seq is None else str(row.seq)
        table.add_row(escape(row.run), seq, row.what, row.digest, row.verdict, escape(row.details))
    return table


def _show(table: Table) -> None:
    """Print a table as wide as it is: paths and names are there to be copied whole."""
    unlimited = console.options.update(max_width=100_000)
    width = Measurement.get(console, unlimited, table).maximum
    Console(highlight=False, emoji=False, width=max(console.width, width)).print(table)
