"""`cotrain admin workers`: how each is, and take one out of service without losing anything."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from cotrain.commands.admin.asking import ask
from cotrain.commands.terminal import AsJson, examples, print_json, print_rich
from cotrain.wire.admin import WorkerList

app = typer.Typer(help="List workers, drain one, and take it back.", no_args_is_help=True)
PoolId = Annotated[str, typer.Argument(metavar="POOL", help="As `workers list` shows it.")]
WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="As `workers list` shows it.")]


@app.command("list", epilog=examples("cotrain admin workers list"))
def list_workers(context: typer.Context, as_json: AsJson = False) -> None:
    """List the workers of all pools, also those that are drained or away."""
    found = WorkerList.model_validate(ask(context, "GET", "workers"))
    if as_json:
        print_json(found)
        return
    table = Table("pool", "worker", "state", "runs", "tokens/s", "host", box=None)
    for worker in found.workers:
        facts = worker.heartbeat or {}
        state = worker.state + (
            ": no other worker, it keeps its runs" if worker.drain_waits else ""
        )
        table.add_row(
            worker.pool, worker.id, state, str(facts.get("runs", "")),
            f"{facts['tokens_per_s']:.0f}" if facts else "", str(facts.get("host", "")),
        )  # fmt: skip
    print_rich(table)


@app.command(epilog=examples("cotrain admin workers drain p-4f1a w0"))
def drain(context: typer.Context, pool: PoolId, worker: WorkerId, as_json: AsJson = False) -> None:
    """Hand a worker's runs to the others of its pool; it takes nothing more until `undrain`, also after a restart."""
    ask(context, "POST", "pools", pool, "workers", worker, "drain")
    if as_json:
        print_json({"worker": worker, "drain": True})


@app.command(epilog=examples("cotrain admin workers undrain p-4f1a w0"))
def undrain(
    context: typer.Context, pool: PoolId, worker: WorkerId, as_json: AsJson = False
) -> None:
    """Let a worker take runs again."""
    ask(context, "POST", "pools", pool, "workers", worker, "undrain")
    if as_json:
        print_json({"worker": worker, "drain": False})
