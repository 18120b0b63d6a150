"""`cotrain admin keys`: the members and viewers of a tenant."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from pydantic import TypeAdapter
from rich.table import Table

from cotrain.commands.admin.asking import ask
from cotrain.commands.admin.tenants import TenantId  # noqa: TC001  # typer reads it
from cotrain.commands.terminal import AsJson, examples, minute, print_json, print_rich
from cotrain.wire.admin import KeyShown, NewKey

app = typer.Typer(help="Make, list and revoke keys of a tenant.", no_args_is_help=True)


@app.command("list", epilog=examples("cotrain admin keys list t-3f9c2a71"))
def list_keys(context: typer.Context, tenant: TenantId, as_json: AsJson = False) -> None:
    """List a tenant's keys, without their secrets."""
    found = TypeAdapter(list[KeyShown]).validate_python(
        ask(context, "GET", "tenants", tenant, "keys")
    )
    if as_json:
        print_json(found)
        return
    table = Table("id", "key", "name", "role", "since", "valid until", "last used", box=None)
    for key in found:
        table.add_row(
            key.id, f"{key.prefix}…", key.name, key.role, _date(key.created_at),
            _date(key.not_after), _date(key.last_used_at),
        )  # fmt: skip
    print_rich(table)


@app.command(epilog=examples("cotrain admin keys create t-3f9c2a71 ci --role viewer --days 30"))
def create(
    context: typer.Context,
    tenant: TenantId,
    name: Annotated[str, typer.Argument(help="Whose key this is.")],
    role: Annotated[
        Literal["member", "viewer"], typer.Option(help="A viewer reads, and changes nothing.")
    ] = "member",
    days: Annotated[float | None, typer.Option(help="Stop accepting it after so long.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it; it is shown only now."""
    wanted = {"name": name, "role": role, **({} if days is None else {"days": days})}
    made = NewKey.model_validate(ask(context, "POST", "tenants", tenant, "keys", json=wanted))
    if as_json:
        print_json(made)
    else:
        typer.echo(made.key)


@app.command(epilog=examples("cotrain admin keys revoke t-3f9c2a71 9d1c4e5f"))
def revoke(
    context: typer.Context,
    tenant: TenantId,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Its id, as `keys list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Stop accepting a key; within five seconds everywhere."""
    ask(context, "DELETE", "tenants", tenant, "keys", key_id)
    if as_json:
        print_json({"id": key_id, "revoked": True})


def _date(at: float | None) -> str:
    return minute(None if at is None else datetime.fromtimestamp(at, UTC))
