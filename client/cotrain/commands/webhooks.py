"""Commands `cotrain webhooks …`: delivery of an account's events to a URL."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from cotrain.commands.terminal import (
    AsJson,
    examples,
    minute,
    opened,
    print_json,
    print_rich,
)

app = typer.Typer(
    help="Be notified when a run ends or fails, or a checkpoint is saved.", no_args_is_help=True
)


@app.command("set", epilog=examples("cotrain webhooks set https://example.com/hooks/cotrain"))
def set_webhook(
    url: Annotated[str, typer.Argument(metavar="URL", help="https://…")], as_json: AsJson = False
) -> None:
    """Send events to this URL. Prints the signing secret, which is shown only once."""
    with opened() as service:
        made = service.create_rest_client().set_webhook(url).result()
    if as_json:
        print_json(made)
        return
    typer.echo(made.secret)
    typer.echo("kept by the server and shown once: verify each event with it", err=True)


@app.command(epilog=examples("cotrain webhooks show --json"))
def show(as_json: AsJson = False) -> None:
    """Show the URL of the webhook, and the state of its deliveries."""
    with opened() as service:
        found = service.create_rest_client().get_webhook().result()
    if as_json:
        print_json(found)
        return
    table = Table(show_header=False, box=None)
    table.add_row("url", found.url)
    table.add_row("since", minute(found.created_at))
    for name in ("waiting", "delivered", "retried", "given_up", "dropped"):
        table.add_row(name.replace("_", " "), str(getattr(found, name)))
    if found.last_outcome:
        table.add_row(
            "last", f"{found.last_outcome}: {found.last_answer} ({minute(found.last_at)})"
        )
    print_rich(table)


@app.command("test", epilog=examples("cotrain webhooks test && cotrain webhooks show"))
def send_test(as_json: AsJson = False) -> None:
    """Send an event of type `test`; `show` prints the outcome."""
    with opened() as service:
        sent = service.create_rest_client().test_webhook().result()
    if as_json:
        print_json(sent)
    else:
        typer.echo(sent.event_id)


@app.command(epilog=examples("cotrain webhooks remove"))
def remove(as_json: AsJson = False) -> None:
    """Remove the webhook; pending events are dropped."""
    with opened() as service:
        service.create_rest_client().remove_webhook().result()
    if as_json:
        print_json({"removed": True})
    else:
        typer.echo("removed")
