"""Command group `cotrain admin`: operation of a server through its admin API."""

from typing import Annotated, Any, Literal

import typer

from cotrain.commands.terminal import (
    DEFAULT_DATA_DIR,
    AdminKey,
    AdminOptions,
    AsJson,
    BaseUrl,
    DataDir,
    ask_admin,
    examples,
    facts,
    minute,
    print_result,
    table,
    valid_until,
)
from cotrain.commands.workers import fleet, workers_app
from cotrain.settings import DEFAULT_BASE_URL
from cotrain.wire.admin import AuditPage, KeyShown, NewKey, TenantDetail, TenantList
from cotrain.wire.rest import MAX_PAGE

# ---- Tenants ----------------------------------------------------------------------------------------

tenants_app = typer.Typer(help="List tenants, set limits and weights, pause and resume.", no_args_is_help=True)
TenantId = Annotated[str, typer.Argument(metavar="TENANT", help="Id of the tenant, as `tenants list` shows it.")]


@tenants_app.command("list", epilog=examples("cotrain admin tenants list --search ada"))
def list_tenants(
    context: typer.Context,
    search: Annotated[str, typer.Option(help="Part of the name or the id.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="Maximum number of tenants.")] = 50,
    offset: Annotated[int, typer.Option(min=0, help="Number of tenants to skip.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List tenants by name, with their pending work."""
    params = {"search": search, "limit": limit, "offset": offset}
    page = TenantList.model_validate(ask_admin(context, "GET", "tenants", params=params))
    columns = (
        "tenant", "name", "weight", "runs", "waiting", "tokens", "samples", "failed (15 min)", "refused (15 min)", "",
    )  # fmt: skip
    rows = (
        (each.id, each.name, f"{each.weight:g}", each.runs, each.ops, each.tokens, each.samples, each.failed,
         each.refused, "paused" if each.paused else None)
        for each in page.tenants
    )  # fmt: skip
    left = page.total - offset - len(page.tenants)
    hint = f"{left} more: --limit, --offset" if left > 0 else ""
    print_result(page, table(columns, rows), as_json=as_json, hint=hint)


@tenants_app.command("show", epilog=examples("cotrain admin tenants show t-3f9c2a71"))
def show_tenant(context: typer.Context, tenant: TenantId, as_json: AsJson = False) -> None:
    """Show one tenant: limits and their use, usage by day, and keys."""
    _print_tenant(TenantDetail.model_validate(ask_admin(context, "GET", "tenants", tenant)), as_json=as_json)


@tenants_app.command("create", epilog=examples("cotrain admin tenants create ada"))
def create_tenant(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the tenant and its first key.")],
    as_json: AsJson = False,
) -> None:
    """Create a tenant and print its first key; it is shown only once."""
    made = NewKey.model_validate(ask_admin(context, "POST", "tenants", json={"name": name}))
    _print_key(made, as_json=as_json)


@tenants_app.command(
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
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="A limit instead of the default; NAME=default removes it. `tenants show` lists the names.",
        ),
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
    found = ask_admin(context, "PATCH", "tenants", tenant, json=change)
    _print_tenant(TenantDetail.model_validate(found), as_json=as_json)


@tenants_app.command("pause", epilog=examples("cotrain admin tenants pause t-3f9c2a71 --reason 'the bill is open'"))
def pause_tenant(
    context: typer.Context,
    tenant: TenantId,
    reason: Annotated[str, typer.Option(help="Reason that its clients receive.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pause a tenant: its requests are accepted up to its limits, and wait."""
    ask_admin(context, "POST", "tenants", tenant, "pause", json={"reason": reason})
    text = f"{tenant} is paused: its requests are accepted, and wait."
    print_result({"tenant": tenant, "paused": True}, text, as_json=as_json)


@tenants_app.command("resume", epilog=examples("cotrain admin tenants resume t-3f9c2a71"))
def resume_tenant(context: typer.Context, tenant: TenantId, as_json: AsJson = False) -> None:
    """Resume a paused tenant."""
    ask_admin(context, "POST", "tenants", tenant, "resume")
    print_result({"tenant": tenant, "paused": False}, f"{tenant} is active.", as_json=as_json)


def _limit(text: str) -> tuple[str, int | None]:
    name, _, number = text.partition("=")
    if number == "default":
        return name, None
    if not number.isascii() or not number.isdecimal():
        raise typer.BadParameter(f"{text}: NAME=NUMBER, or NAME=default")
    return name, int(number)


def _print_tenant(tenant: TenantDetail, *, as_json: bool) -> None:
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


# ---- Keys and runs of a tenant ----------------------------------------------------------------------

keys_app = typer.Typer(help="Make, list and revoke keys of a tenant.", no_args_is_help=True)


@keys_app.command("list", epilog=examples("cotrain admin keys list t-3f9c2a71"))
def list_keys(context: typer.Context, tenant: TenantId, as_json: AsJson = False) -> None:
    """List a tenant's keys, without their secrets."""
    found = [KeyShown.model_validate(key) for key in ask_admin(context, "GET", "tenants", tenant, "keys")]
    rows = (
        (
            key.id,
            f"{key.prefix}…",
            key.name,
            key.role,
            minute(key.created_at),
            valid_until(key.not_after),
            key.last_used_at and minute(key.last_used_at),
        )
        for key in found
    )
    columns = ("id", "key", "name", "role", "since", "valid until", "last used")
    print_result(found, table(columns, rows), as_json=as_json)


@keys_app.command("create", epilog=examples("cotrain admin keys create t-3f9c2a71 ci --role viewer --days 30"))
def create_key(
    context: typer.Context,
    tenant: TenantId,
    name: Annotated[str, typer.Argument(help="Name of the key's user.")],
    role: Annotated[Literal["member", "viewer"], typer.Option(help="A viewer can only read.")] = "member",
    days: Annotated[float | None, typer.Option(help="Days until it expires.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it; it is shown only once."""
    wanted = {"name": name, "role": role, **({} if days is None else {"days": days})}
    made = NewKey.model_validate(ask_admin(context, "POST", "tenants", tenant, "keys", json=wanted))
    _print_key(made, as_json=as_json)


def _print_key(made: NewKey, *, as_json: bool) -> None:
    hint = f"key {made.id} of {made.name}, {made.role} of tenant {made.tenant}; it is shown only now"
    print_result(made, made.key, as_json=as_json, hint=hint)


@keys_app.command("revoke", epilog=examples("cotrain admin keys revoke t-3f9c2a71 9d1c4e5f"))
def revoke_key(
    context: typer.Context,
    tenant: TenantId,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, as `keys list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key; every process rejects it within five seconds."""
    ask_admin(context, "DELETE", "tenants", tenant, "keys", key_id)
    text = f"Key {key_id} of {tenant} is revoked."
    print_result({"id": key_id, "revoked": True}, text, as_json=as_json)


runs_app = typer.Typer(help="Pause, resume, move or end a run of a tenant.", no_args_is_help=True)
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]


@runs_app.command("pause", epilog=examples("cotrain admin runs pause t-3f9c2a71 1f2e3d4c:train:0"))
def pause_run(
    context: typer.Context,
    tenant: TenantId,
    run: RunId,
    reason: Annotated[str, typer.Option(help="Reason that its clients receive.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pause a run: its requests are accepted, and wait."""
    ask_admin(context, "POST", "tenants", tenant, "runs", run, "pause", json={"reason": reason})
    _done(run, "paused", as_json=as_json)


@runs_app.command("resume", epilog=examples("cotrain admin runs resume t-3f9c2a71 1f2e3d4c:train:0"))
def resume_run(context: typer.Context, tenant: TenantId, run: RunId, as_json: AsJson = False) -> None:
    """Resume a paused run."""
    ask_admin(context, "POST", "tenants", tenant, "runs", run, "resume")
    _done(run, "resumed", as_json=as_json)


@runs_app.command("move", epilog=examples("cotrain admin runs move t-3f9c2a71 1f2e3d4c:train:0 w1"))
def move_run(
    context: typer.Context,
    tenant: TenantId,
    run: RunId,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `workers list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Move a run to another worker of its pool; nothing is replayed, and no request fails."""
    ask_admin(context, "POST", "tenants", tenant, "runs", run, "move", json={"worker": worker})
    _done(run, "to be moved", as_json=as_json)


@runs_app.command("close", epilog=examples("cotrain admin runs close t-3f9c2a71 1f2e3d4c:train:0"))
def close_run(context: typer.Context, tenant: TenantId, run: RunId, as_json: AsJson = False) -> None:
    """Close a run as its owner can. Pending ops fail, planned ops still finish."""
    ask_admin(context, "POST", "tenants", tenant, "runs", run, "close")
    _done(run, "closed", as_json=as_json)


def _done(run: str, what: str, *, as_json: bool) -> None:
    print_result({"run": run, "done": what}, f"Run {run} is {what}.", as_json=as_json)


# ---- The group --------------------------------------------------------------------------------------

app = typer.Typer(
    help="Administer a server: tenants, keys, runs, workers. Needs the admin key.",
    epilog=examples("cotrain admin tenants list", "cotrain admin workers list --json"),
    no_args_is_help=True,
)
app.add_typer(tenants_app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(runs_app, name="runs")
app.add_typer(workers_app, name="workers")
app.command(epilog=examples("cotrain admin fleet", "cotrain admin fleet --json | jq '.pools[].workers_wanted'"))(fleet)


@app.callback()
def server(
    context: typer.Context,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    admin_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set the server and the key."""
    context.obj = AdminOptions(base_url, admin_key, data_dir)


@app.command(epilog=examples("cotrain admin audit", "cotrain admin audit --tenant t-3f9c2a71 --json"))
def audit(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(help="Only actions of this tenant, or on it.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of actions.")] = 50,
    before: Annotated[str | None, typer.Option(help="Older actions: `next` of the previous page.")] = None,
    as_json: AsJson = False,
) -> None:
    """List administrative actions and their keys, newest first."""
    params = {"tenant": tenant, "limit": limit, "before": before}
    page = AuditPage.model_validate(ask_admin(context, "GET", "audit", params=params))
    rows = (
        (
            minute(event.at),
            event.key_name or event.key_id,
            event.event,
            event.tenant,
            " ".join(f"{name}={value}" for name, value in event.details.items()),
        )
        for event in page.events
    )
    columns = ("when", "key", "did", "tenant", "details")
    hint = f"more: --before {page.next}" if page.next else ""
    print_result(page, table(columns, rows), as_json=as_json, hint=hint)
