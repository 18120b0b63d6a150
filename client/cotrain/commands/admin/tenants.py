"""Commands `cotrain admin tenants`: tenants, their limits and their pending work."""

from typing import Annotated, Any

import typer

from cotrain.commands.admin.asking import ask
from cotrain.commands.terminal import AsJson, examples, facts, print_result, table
from cotrain.wire.admin import NewKey, TenantDetail, TenantList
from cotrain.wire.rest import MAX_PAGE

app = typer.Typer(help="List tenants, set limits and weights, pause and resume.", no_args_is_help=True)
TenantId = Annotated[str, typer.Argument(metavar="TENANT", help="Its id, as `tenants list` shows it.")]


@app.command("list", epilog=examples("cotrain admin tenants list --search ada"))
def list_tenants(
    context: typer.Context,
    search: Annotated[str, typer.Option(help="In the name or the id.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="How many at most.")] = 50,
    offset: Annotated[int, typer.Option(min=0, help="How many to skip.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List tenants by name, with their pending work."""
    params = {"search": search, "limit": limit, "offset": offset}
    page = TenantList.model_validate(ask(context, "GET", "tenants", params=params))
    columns = (
        *("tenant", "name", "weight", "runs", "waiting", "tokens", "samples"),
        *("failed (15 min)", "refused (15 min)", ""),
    )
    rows = (
        (
            *(each.id, each.name, f"{each.weight:g}", each.runs, each.ops, each.tokens),
            *(each.samples, each.failed, each.refused, "paused" if each.paused else None),
        )
        for each in page.tenants
    )
    print_result(page, table(columns, rows), as_json=as_json)
    left = page.total - offset - len(page.tenants)
    if left > 0 and not as_json:
        typer.echo(f"{left} more: --limit, --offset", err=True)


@app.command(epilog=examples("cotrain admin tenants show t-3f9c2a71"))
def show(context: typer.Context, tenant: TenantId, as_json: AsJson = False) -> None:
    """Show one tenant: limits and their use, usage by day, and keys."""
    _print(TenantDetail.model_validate(ask(context, "GET", "tenants", tenant)), as_json=as_json)


@app.command(epilog=examples("cotrain admin tenants create ada"))
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the tenant and its first key.")],
    as_json: AsJson = False,
) -> None:
    """Create a tenant and print its first key; it is shown only once."""
    made = NewKey.model_validate(ask(context, "POST", "tenants", json={"name": name}))
    print_result(made, made.key, as_json=as_json)


@app.command(
    "set",
    epilog=examples(
        "cotrain admin tenants set t-3f9c2a71 --limit ops=1000 --limit runs=default",
        "cotrain admin tenants set t-3f9c2a71 --weight 2",
    ),
)
def set_tenant(
    context: typer.Context,
    tenant: TenantId,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=NUMBER", help="A limit over the default; NAME=default ends it.")
    ] = None,
    weight: Annotated[
        float | None, typer.Option(help="0.1 to 10: its share of a contended cycle; 1 is the default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set limits and the weight; every process applies them within a second, without a restart."""
    change: dict[str, Any] = {} if weight is None else {"weight": weight}
    if limit:
        change["limits"] = dict(_limit(each) for each in limit)
    if not change:
        raise typer.BadParameter("give --limit or --weight")
    found = ask(context, "PATCH", "tenants", tenant, json=change)
    _print(TenantDetail.model_validate(found), as_json=as_json)


@app.command(epilog=examples("cotrain admin tenants pause t-3f9c2a71 --reason 'the bill is open'"))
def pause(
    context: typer.Context,
    tenant: TenantId,
    reason: Annotated[str, typer.Option(help="Its clients read it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pause a tenant: its requests are accepted up to its limits, and wait."""
    ask(context, "POST", "tenants", tenant, "pause", json={"reason": reason})
    text = f"{tenant} is paused: its requests are accepted, and wait."
    print_result({"tenant": tenant, "paused": True}, text, as_json=as_json)


@app.command(epilog=examples("cotrain admin tenants resume t-3f9c2a71"))
def resume(context: typer.Context, tenant: TenantId, as_json: AsJson = False) -> None:
    """Resume a paused tenant."""
    ask(context, "POST", "tenants", tenant, "resume")
    print_result({"tenant": tenant, "paused": False}, f"{tenant} is active.", as_json=as_json)


def _limit(text: str) -> tuple[str, int | None]:
    name, _, number = text.partition("=")
    if number == "default":
        return name, None
    if not number.isascii() or not number.isdecimal():
        raise typer.BadParameter(f"{text}: NAME=NUMBER, or NAME=default")
    return name, int(number)


def _print(tenant: TenantDetail, *, as_json: bool) -> None:
    about = facts(
        ("tenant", tenant.id),
        ("name", tenant.name),
        ("weight", f"{tenant.weight:g}"),
        ("state", f"paused: {tenant.paused.reason or 'yes'}" if tenant.paused else "active"),
        *((f"run {run}", f"paused: {it.reason or 'yes'}") for run, it in tenant.paused_runs.items()),
        *((f"key {key.id}", f"{key.name} ({key.role})") for key in tenant.keys),
    )
    limits = table(
        ("limit", "used", "of", "default"),
        ((quota.name, quota.used, quota.limit, quota.default if quota.is_own else None) for quota in tenant.quotas),
    )
    print_result(tenant, about, limits, as_json=as_json)
