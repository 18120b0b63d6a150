"""`cotrain admin runs`: hold one run back, let it go on, move it, end it."""

from __future__ import annotations

from typing import Annotated

import typer

from cotrain.commands.admin.asking import ask
from cotrain.commands.admin.tenants import TenantId  # noqa: TC001  # typer reads it
from cotrain.commands.terminal import AsJson, examples, print_json

app = typer.Typer(help="Hold back, let go on, move or end a run of a tenant.", no_args_is_help=True)
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Its id.")]


@app.command(epilog=examples("cotrain admin runs pause t-3f9c2a71 1f2e3d4c:train:0"))
def pause(
    context: typer.Context,
    tenant: TenantId,
    run: RunId,
    reason: Annotated[str, typer.Option(help="Its clients read it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Hold a run back: what it is sent is accepted, and waits."""
    ask(context, "POST", "tenants", tenant, "runs", run, "pause", json={"reason": reason})
    _done(run, "paused", as_json=as_json)


@app.command(epilog=examples("cotrain admin runs resume t-3f9c2a71 1f2e3d4c:train:0"))
def resume(context: typer.Context, tenant: TenantId, run: RunId, as_json: AsJson = False) -> None:
    """Let a run go on."""
    ask(context, "POST", "tenants", tenant, "runs", run, "resume")
    _done(run, "resumed", as_json=as_json)


@app.command(epilog=examples("cotrain admin runs move t-3f9c2a71 1f2e3d4c:train:0 w1"))
def move(
    context: typer.Context,
    tenant: TenantId,
    run: RunId,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `workers list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Have a run go on at another worker of its pool; nothing is replayed, and no request fails."""
    ask(context, "POST", "tenants", tenant, "runs", run, "move", json={"worker": worker})
    _done(run, "to be moved", as_json=as_json)


@app.command(epilog=examples("cotrain admin runs close t-3f9c2a71 1f2e3d4c:train:0"))
def close(context: typer.Context, tenant: TenantId, run: RunId, as_json: AsJson = False) -> None:
    """End a run as its owner can: what waits fails, what is planned still comes."""
    ask(context, "POST", "tenants", tenant, "runs", run, "close")
    _done(run, "closed", as_json=as_json)


def _done(run: str, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"run": run, "done": what})
