"""Commands `cotrain replay` and `cotrain recorder …`: replay, list and export recorded cycles."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from cotrain.commands.terminal import AsJson, examples, harmless, print_json, print_result, print_rich, table
from cotrain_store.messages.ids import RunId

if TYPE_CHECKING:
    # Every `cotrain` loads this module, and these import torch: 8 s.
    from cotrain_workers.engine.engine import Engine
    from cotrain_workers.recorder.file import CycleFacts, RecordedCycle
    from cotrain_workers.recorder.recorder import Compared

# If torch is missing, `cotrain` prints the package to install. Commands import it themselves: the
# import takes seconds, and every `cotrain` command loads this module.
if find_spec("torch") is None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")

recorder = typer.Typer(help="List recorded cycles, and hand one out.", no_args_is_help=True)

DEFAULT_DATA_DIR = Path.home() / ".cotrain"  # the default of `cotrain serve`
#: Exit codes of `replay` other than 0.
DIVERGED, UNUSABLE = 1, 2

Recording = Annotated[Path, typer.Argument(help="A file below <data>/recorder.", exists=True)]


def replay(
    file: Recording,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id or folder; by default what the recording worker had.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default as recorded, where it is there.")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="Also run what failed by an accident.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run one recorded cycle again, without a server, and compare every result and state.

    Ends with 0, with 1 where something diverged, with 2 where FILE or the base model cannot be used.

    Examples:

    cotrain replay ~/.cotrain/recorder/POOL/w0/000000000042-3.zip

    cotrain replay cycle.zip --base-model /models/Qwen3-8B --json
    """
    from cotrain_workers.recorder.file import RecordingUnreadable, read_cycle
    from cotrain_workers.recorder.recorder import compared, engine_for, restore_before, run_again, tolerance_of

    try:
        cycle = read_cycle(file)
        engine = engine_for(cycle.facts, base_model, device)
        restore_before(engine, cycle)
    except (RecordingUnreadable, OSError, ValueError) as unusable:
        typer.echo(harmless(str(unusable)), err=True)
        raise typer.Exit(UNUSABLE) from unusable
    if not as_json:
        _describe(cycle, engine)
    again = run_again(engine, cycle, everything=everything)
    rows = list(compared(cycle, again, tolerance_of(cycle.facts.numerics, engine.facts.numerics)))
    diverged = sum(row.verdict == "DIVERGED" for row in rows)
    if as_json:
        others = cycle.facts.numerics.differences(engine.facts.numerics)
        print_json({**_facts(cycle.facts), "other_numerics": others, "compared": rows, "diverged": diverged})
    else:
        _show(rows, diverged, is_new=cycle.found is None)
    if diverged:
        raise typer.Exit(DIVERGED)


@recorder.command(name="list", epilog=examples("cotrain recorder list --data-dir /srv/cotrain"))
def list_recordings(
    data_dir: Annotated[
        Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Where the server keeps everything.")
    ] = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """List the recorded cycles of all workers, the newest first."""
    from cotrain_workers.recorder.file import RecordingUnreadable, read_facts
    from cotrain_workers.recorder.recorder import SUFFIX

    found: list[tuple[Path, CycleFacts | None]] = []
    files = (data_dir / "recorder").glob(f"*/*/*{SUFFIX}")
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            found.append((path, read_facts(path)))
        except RecordingUnreadable:
            found.append((path, None))
    rows = (
        (path, *((*_listed(facts), decimal(path.stat().st_size)) if facts else ("damaged",))) for path, facts in found
    )
    print_result(
        [{"file": path, **_sized(path), **_facts(facts)} for path, facts in found],
        table(("file", "recorded", "worker", "cycle", "runs", "ops", "size"), rows),
        as_json=as_json,
    )


@recorder.command(epilog=examples("cotrain recorder export cycle.zip mine.zip --run RUN"))
def export(
    file: Recording,
    output: Annotated[Path, typer.Argument(help="The file to write.")],
    run: Annotated[str | None, typer.Option(help="This run alone, nothing of other tenants.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a recorded cycle, or one run of it, to a file of its own."""
    from cotrain_workers.recorder.file import RecordingUnreadable, only_run, read_cycle, write_cycle

    try:
        cycle = read_cycle(file)
        cycle = cycle if run is None else only_run(cycle, RunId(run))
        write_cycle(output, cycle)
    except (RecordingUnreadable, OSError, ValueError) as unusable:
        typer.echo(harmless(str(unusable)), err=True)
        raise typer.Exit(UNUSABLE) from unusable
    print_result({"file": output, **_sized(output), **_facts(cycle.facts)}, as_json=as_json)


def _describe(cycle: RecordedCycle, engine: Engine) -> None:
    """Print a description of the cycle and of the comparison."""
    facts = cycle.facts
    recorded, worker, number, runs, ops = _listed(facts)
    print_rich(f"Cycle {number} of {facts.base_model} on {worker}, {recorded}: {runs} runs, {ops} ops.")
    others = facts.numerics.differences(engine.facts.numerics)
    if others:
        print_rich(f"Other numerics ({'; '.join(others)}): compared with a tolerance.")
    elif facts.numerics.device != "cpu":
        print_rich("Not on a CPU: compared with a tolerance.")
    if cycle.found is None:
        print_rich("It has no outcome: its process died in this cycle.")


def _show(rows: Sequence[Compared], diverged: int, *, is_new: bool) -> None:
    cells = ((row.run, row.seq, row.what, row.digest, row.verdict, row.details) for row in rows)
    print_rich(table(("run", "seq", "what", "digest", "", ""), cells))
    if diverged:
        print_rich(f"{diverged} of {len(rows)} diverged.")
    else:
        print_rich("Nothing to compare with." if is_new else "Nothing diverged.")


def _listed(facts: CycleFacts) -> tuple[str, ...]:
    step = facts.step
    counts = (step.cycle, len(step.tenant_by_run), len(step.ops))
    cycle, runs, ops = (str(count) for count in counts)
    return f"{_time(facts):%Y-%m-%d %H:%M:%S}", step.worker, cycle, runs, ops


def _facts(facts: CycleFacts | None) -> dict[str, Any]:
    """Return the facts of a cycle for JSON; all null for a damaged file."""
    return {
        "recorded_at": facts and _time(facts),
        "base_model": facts and facts.base_model,
        "worker": facts and facts.step.worker,
        "cycle": facts and facts.step.cycle,
        "runs": facts and sorted(facts.step.tenant_by_run),
        "ops": facts and len(facts.step.ops),
    }


def _sized(path: Path) -> dict[str, int]:
    return {"size_bytes": path.stat().st_size}


def _time(facts: CycleFacts) -> datetime:
    return datetime.fromtimestamp(facts.recorded_at, UTC)
