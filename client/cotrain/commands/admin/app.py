"""The group `cotrain admin`, and the audit log."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path  # noqa: TC003  # typer reads it at run time
from typing import Annotated

import typer
from rich.table import Table

from cotrain.commands.admin import keys, runs, tenants, workers
from cotrain.commands.admin.asking import Server, ask
from cotrain.commands.http import DEFAULT_DATA_DIR
from cotrain.commands.terminal import AsJson, examples, minute, print_json, print_rich
from cotrain.settings import DEFAULT_BASE_URL
from cotrain.wire.admin import AuditPage
from cotrain.wire.fleet import Fleet

app = typer.Typer(
    help="Administer a server: tenants, keys, runs, workers. Needs the admin key.",
    epilog=examples("cotrain admin tenants list", "cotrain admin workers list --json"),
    no_args_is_help=True,
)
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(runs.app, name="runs")
app.add_typer(workers.app, name="workers")


@app.callback()
def server(
    context: typer.Context,
    base_url: Annotated[str, typer.Option(envvar="COTRAIN_BASE_URL")] = DEFAULT_BASE_URL,
    admin_key: Annotated[
        str, typer.Option(envvar="COTRAIN_ADMIN_KEY", help="The operator's key.")
    ] = "",
    data_dir: Annotated[
        Path, typer.Option(envvar="COTRAIN_DATA_DIR", help="Where a server on this host keeps it.")
    ] = DEFAULT_DATA_DIR,
) -> None:
    """Say which server, and which key."""
    context.obj = Server(base_url, admin_key, data_dir)


@app.command(
    epilog=examples(
        "cotrain admin fleet", "cotrain admin fleet --json | jq '.pools[].workers_wanted'"
    )
)
def fleet(context: typer.Context, as_json: AsJson = False) -> None:
    """Show how many workers each base model is to have, and what those do that there are."""
    found = Fleet.model_validate(ask(context, "GET", "fleet", below=""))
    if as_json:
        print_json(found)
        return
    table = Table(
        *("base model", "worker", "state", "wanted", "runs", "tokens/s", "busy", "backlog"),
        box=None,
    )
    for pool in found.pools:
        there = f"{len(pool.workers)} there"
        table.add_row(
            pool.base_model, there, "", str(pool.workers_wanted), "", "", "", f"{pool.backlog_s:.1f} s"
        )  # fmt: skip
        for each in pool.workers:
            table.add_row(
                "", each.id, each.state, "", str(each.runs), f"{each.tokens_per_s:,.0f}",
                f"{each.busy:.0%}", f"{each.backlog_s:.1f} s",
            )  # fmt: skip
    print_rich(table)


@app.command(
    epilog=examples("cotrain admin audit", "cotrain admin audit --tenant t-3f9c2a71 --json")
)
def audit(
    context: typer.Context,
    tenant: Annotated[
        str | None, typer.Option(help="What this tenant did, and what was done to it.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 50,
    before: Annotated[
        str | None, typer.Option(help="Earlier ones: `next` of the page before.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what was done and by which key, newest first."""
    params = {"tenant": tenant, "limit": limit, "before": before}
    page = AuditPage.model_validate(ask(context, "GET", "audit", params=params))
    if as_json:
        print_json(page)
        return
    table = Table("when", "key", "did", "tenant", "details", box=None)
    for event in page.events:
        details = " ".join(f"{name}={value}" for name, value in event.details.items())
        who = event.key_name or event.key_id
        at = minute(datetime.fromtimestamp(event.at, UTC))
        table.add_row(at, who, event.event, event.tenant, details)
    print_rich(table)
    if page.next:
        typer.echo(f"more: --before {page.next}", err=True)
