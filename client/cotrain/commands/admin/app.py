"""Command group `cotrain admin`, with the commands for keys, runs, workers, fleet and audit log.

* `cotrain admin keys`: API keys of a tenant.
* `cotrain admin runs`: pause, resume, move or close one run.
* `cotrain admin workers`: list workers, and drain one without losing work.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from pydantic import TypeAdapter

from cotrain.commands.admin import tenants
from cotrain.commands.admin.asking import AdminKey, Server, ask
from cotrain.commands.admin.tenants import TenantId
from cotrain.commands.terminal import DEFAULT_DATA_DIR, AsJson, BaseUrl, DataDir, examples, minute, print_result, table
from cotrain.settings import DEFAULT_BASE_URL
from cotrain.wire.admin import AuditPage, KeyShown, NewKey, WorkerList, WorkerShown
from cotrain.wire.status import Fleet, Restoring

keys_app = typer.Typer(help="Make, list and revoke keys of a tenant.", no_args_is_help=True)


@keys_app.command("list", epilog=examples("cotrain admin keys list t-3f9c2a71"))
def list_keys(context: typer.Context, tenant: TenantId, as_json: AsJson = False) -> None:
    """List a tenant's keys, without their secrets."""
    found = TypeAdapter(list[KeyShown]).validate_python(ask(context, "GET", "tenants", tenant, "keys"))
    rows = (
        (
            *(key.id, f"{key.prefix}…", key.name, key.role),
            *(at and minute(at) for at in (key.created_at, key.not_after, key.last_used_at)),
        )
        for key in found
    )
    columns = ("id", "key", "name", "role", "since", "valid until", "last used")
    print_result(found, table(columns, rows), as_json=as_json)


@keys_app.command(epilog=examples("cotrain admin keys create t-3f9c2a71 ci --role viewer --days 30"))
def create(
    context: typer.Context,
    tenant: TenantId,
    name: Annotated[str, typer.Argument(help="Whose key this is.")],
    role: Annotated[Literal["member", "viewer"], typer.Option(help="A viewer reads, and changes nothing.")] = "member",
    days: Annotated[float | None, typer.Option(help="Stop accepting it after so long.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it; it is shown only once."""
    wanted = {"name": name, "role": role, **({} if days is None else {"days": days})}
    made = NewKey.model_validate(ask(context, "POST", "tenants", tenant, "keys", json=wanted))
    print_result(made, made.key, as_json=as_json)


@keys_app.command(epilog=examples("cotrain admin keys revoke t-3f9c2a71 9d1c4e5f"))
def revoke(
    context: typer.Context,
    tenant: TenantId,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Its id, as `keys list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Revoke a key; every process rejects it within five seconds."""
    ask(context, "DELETE", "tenants", tenant, "keys", key_id)
    text = f"Key {key_id} of {tenant} is revoked."
    print_result({"id": key_id, "revoked": True}, text, as_json=as_json)


runs_app = typer.Typer(help="Pause, resume, move or end a run of a tenant.", no_args_is_help=True)
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Its id.")]


@runs_app.command(epilog=examples("cotrain admin runs pause t-3f9c2a71 1f2e3d4c:train:0"))
def pause(
    context: typer.Context,
    tenant: TenantId,
    run: RunId,
    reason: Annotated[str, typer.Option(help="Its clients read it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pause a run: its requests are accepted, and wait."""
    ask(context, "POST", "tenants", tenant, "runs", run, "pause", json={"reason": reason})
    _done(run, "paused", as_json=as_json)


@runs_app.command(epilog=examples("cotrain admin runs resume t-3f9c2a71 1f2e3d4c:train:0"))
def resume(context: typer.Context, tenant: TenantId, run: RunId, as_json: AsJson = False) -> None:
    """Resume a paused run."""
    ask(context, "POST", "tenants", tenant, "runs", run, "resume")
    _done(run, "resumed", as_json=as_json)


@runs_app.command(epilog=examples("cotrain admin runs move t-3f9c2a71 1f2e3d4c:train:0 w1"))
def move(
    context: typer.Context,
    tenant: TenantId,
    run: RunId,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `workers list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Move a run to another worker of its pool; nothing is replayed, and no request fails."""
    ask(context, "POST", "tenants", tenant, "runs", run, "move", json={"worker": worker})
    _done(run, "to be moved", as_json=as_json)


@runs_app.command(epilog=examples("cotrain admin runs close t-3f9c2a71 1f2e3d4c:train:0"))
def close(context: typer.Context, tenant: TenantId, run: RunId, as_json: AsJson = False) -> None:
    """Close a run as its owner can. Pending ops fail, planned ops still finish."""
    ask(context, "POST", "tenants", tenant, "runs", run, "close")
    _done(run, "closed", as_json=as_json)


def _done(run: str, what: str, *, as_json: bool) -> None:
    print_result({"run": run, "done": what}, f"Run {run} is {what}.", as_json=as_json)


workers_app = typer.Typer(help="List workers, drain one, and take it back.", no_args_is_help=True)
PoolId = Annotated[str, typer.Argument(metavar="POOL", help="As `workers list` shows it.")]
WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="As `workers list` shows it.")]


@workers_app.command("list", epilog=examples("cotrain admin workers list"))
def list_workers(context: typer.Context, as_json: AsJson = False) -> None:
    """List the workers of all pools, including drained and unreachable ones."""
    found = WorkerList.model_validate(ask(context, "GET", "workers"))
    columns = ("pool", "worker", "state", "runs", "tokens/s", "host", "last exit")
    print_result(found, table(columns, map(_worker, found.workers)), as_json=as_json)


def _worker(worker: WorkerShown) -> Sequence[object]:
    heartbeat = worker.heartbeat or {}
    state = worker.state + (": no other worker, it keeps its runs" if worker.drain_waits else "")
    if heartbeat.get("restoring"):
        state = f"{state}, restoring: {Restoring.model_validate(heartbeat['restoring']).text}"
    tokens_per_s = f"{heartbeat['tokens_per_s']:.0f}" if heartbeat else None
    runs, host = heartbeat.get("runs"), heartbeat.get("host")
    last = worker.last_exit
    why = f"{minute(last['at'])}, restarts: {last['count']}, {last['reason']}" if last else None
    return worker.pool, worker.id, state, runs, tokens_per_s, host, why


@workers_app.command(epilog=examples("cotrain admin workers drain p-4f1a w0"))
def drain(context: typer.Context, pool: PoolId, worker: WorkerId, as_json: AsJson = False) -> None:
    """Move a worker's runs to others of its pool. It gets no new runs until `undrain`, even after a restart."""
    ask(context, "POST", "pools", pool, "workers", worker, "drain")
    text = f"{worker} drains: its runs move to other workers of its pool. Without one, it keeps them."
    print_result({"worker": worker, "drain": True}, text, as_json=as_json)


@workers_app.command(epilog=examples("cotrain admin workers undrain p-4f1a w0"))
def undrain(context: typer.Context, pool: PoolId, worker: WorkerId, as_json: AsJson = False) -> None:
    """Allow a drained worker to receive runs again."""
    ask(context, "POST", "pools", pool, "workers", worker, "undrain")
    text = f"{worker} receives runs again."
    print_result({"worker": worker, "drain": False}, text, as_json=as_json)


app = typer.Typer(
    help="Administer a server: tenants, keys, runs, workers. Needs the admin key.",
    epilog=examples("cotrain admin tenants list", "cotrain admin workers list --json"),
    no_args_is_help=True,
)
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys_app, name="keys")
app.add_typer(runs_app, name="runs")
app.add_typer(workers_app, name="workers")


@app.callback()
def server(
    context: typer.Context,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    admin_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set the server and the key."""
    context.obj = Server(base_url, admin_key, data_dir)


@app.command(epilog=examples("cotrain admin fleet", "cotrain admin fleet --json | jq '.pools[].workers_wanted'"))
def fleet(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the required number of workers for each base model, and the state of the running ones."""
    found = Fleet.model_validate(ask(context, "GET", "fleet", below=""))
    columns = ("base model", "worker", "state", "wanted", "runs", "tokens/s", "busy", "backlog")
    rows: list[Sequence[object]] = []
    for pool in found.pools:
        there, backlog = f"{len(pool.workers)} there", f"{pool.backlog_s:.1f} s"
        rows.append((pool.base_model, there, "", pool.workers_wanted, "", "", "", backlog))
        for each in pool.workers:
            state = f"restoring: {each.restoring.text}" if each.restoring else each.state
            rates = (f"{each.tokens_per_s:,.0f}", f"{each.busy:.0%}", f"{each.backlog_s:.1f} s")
            rows.append(("", each.id, state, "", each.runs, *rates))
    print_result(found, table(columns, rows), as_json=as_json)


@app.command(epilog=examples("cotrain admin audit", "cotrain admin audit --tenant t-3f9c2a71 --json"))
def audit(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(help="What this tenant did, and what was done to it.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 50,
    before: Annotated[str | None, typer.Option(help="Earlier ones: `next` of the page before.")] = None,
    as_json: AsJson = False,
) -> None:
    """List administrative actions and their keys, newest first."""
    params = {"tenant": tenant, "limit": limit, "before": before}
    page = AuditPage.model_validate(ask(context, "GET", "audit", params=params))
    rows = (
        (
            *(minute(event.at), event.key_name or event.key_id, event.event, event.tenant),
            " ".join(f"{name}={value}" for name, value in event.details.items()),
        )
        for event in page.events
    )
    columns = ("when", "key", "did", "tenant", "details")
    print_result(page, table(columns, rows), as_json=as_json)
    if page.next and not as_json:
        typer.echo(f"more: --before {page.next}", err=True)
