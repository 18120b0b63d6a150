"""Commands on the workers of a server: `cotrain admin workers …`, `cotrain admin fleet` and `cotrain selfcheck`."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

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
    minute,
    print_result,
    table,
)
from cotrain.settings import DEFAULT_BASE_URL
from cotrain.wire.admin import Fleet, Restoring, SelfCheckAsked, WorkerList, WorkerShown

#: Interval in s between two requests for the results.
POLL_S = 1.0
#: Exit statuses: a check failed, or a worker gave no result in time.
FAILED, UNANSWERED = 1, 2
CHECKS = ("logprobs", "gradients", "weights", "samples")

workers_app = typer.Typer(help="List, drain and undrain workers.", no_args_is_help=True)
PoolId = Annotated[str, typer.Argument(metavar="POOL", help="Id of the pool, as `workers list` shows it.")]
WorkerId = Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `workers list` shows it.")]


@workers_app.command("list", epilog=examples("cotrain admin workers list"))
def list_workers(context: typer.Context, as_json: AsJson = False) -> None:
    """List the workers of all pools, including drained and unreachable ones."""
    found = WorkerList.model_validate(ask_admin(context, "GET", "workers"))
    columns = ("pool", "worker", "state", "runs", "tokens/s", "host", "last exit")
    print_result(found, table(columns, map(_worker_row, found.workers)), as_json=as_json)


@workers_app.command(epilog=examples("cotrain admin workers drain p-4f1a w0"))
def drain(context: typer.Context, pool: PoolId, worker: WorkerId, as_json: AsJson = False) -> None:
    """Move a worker's runs to others of its pool. It gets no new runs until `undrain`, even after a restart."""
    ask_admin(context, "POST", "pools", pool, "workers", worker, "drain")
    text = f"{worker} drains: its runs move to other workers of its pool. Without one, it keeps them."
    print_result({"worker": worker, "drain": True}, text, as_json=as_json)


@workers_app.command(epilog=examples("cotrain admin workers undrain p-4f1a w0"))
def undrain(context: typer.Context, pool: PoolId, worker: WorkerId, as_json: AsJson = False) -> None:
    """Allow a drained worker to receive runs again."""
    ask_admin(context, "POST", "pools", pool, "workers", worker, "undrain")
    text = f"{worker} receives runs again."
    print_result({"worker": worker, "drain": False}, text, as_json=as_json)


def fleet(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the required number of workers for each base model, and the state of the running ones."""
    found = Fleet.model_validate(ask_admin(context, "GET", "fleet", below=""))
    columns = ("base model", "worker", "state", "wanted", "runs", "tokens/s", "busy", "backlog")
    rows: list[Sequence[object]] = []
    for pool in found.pools:
        there, backlog = f"{len(pool.workers)} running", f"{pool.backlog_s:.1f} s"
        rows.append((pool.base_model, there, "", pool.workers_wanted, "", "", "", backlog))
        for each in pool.workers:
            state = f"restoring: {each.restoring.text}" if each.restoring else each.state
            rates = (f"{each.tokens_per_s:,.0f}", f"{each.busy:.0%}", f"{each.backlog_s:.1f} s")
            rows.append(("", each.id, state, "", each.runs, *rates))
    print_result(found, table(columns, rows), as_json=as_json)


def selfcheck(
    context: typer.Context,
    worker: Annotated[list[str] | None, typer.Option(help="Only this worker; may be repeated. Default: all.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the results.")] = 120.0,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    admin_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Check on live workers that an adapter alone and in a mix gives the same numbers.

    Each worker runs passes and samples of temporary adapters between two cycles. The exit status is 1 if a check failed,
    and 2 if a worker gave no result in time or none is live.
    """
    context.obj = AdminOptions(base_url, admin_key, data_dir)
    chosen = [each for each in _workers(context) if each.heartbeat and (not worker or each.id in worker)]
    checks = {(each.pool, each.id): _started(context, each) for each in chosen}
    until = time.monotonic() + timeout_s
    found = _results(context, checks)
    while len(found) < len(checks) and time.monotonic() < until:
        time.sleep(POLL_S)
        found = _results(context, checks)
    rows = [{"pool": pool, "worker": name, **(found.get((pool, name)) or {"ok": None})} for pool, name in checks]
    columns = ("pool", "worker", "result", *CHECKS, "limit", "took")
    problems = [f"{row['worker']}: {row['problem']}" for row in rows if row.get("problem")]
    print_result(rows, table(columns, map(_result_row, rows)), *problems, as_json=as_json)
    if any(row["ok"] is False for row in rows):
        raise typer.Exit(FAILED)
    if not rows or any(row["ok"] is None for row in rows):
        raise typer.Exit(UNANSWERED)


def _worker_row(worker: WorkerShown) -> Sequence[object]:
    heartbeat = worker.heartbeat or {}
    state = worker.state + (": no other worker, it keeps its runs" if worker.drain_waits else "")
    if heartbeat.get("restoring"):
        state = f"{state}, restoring: {Restoring.model_validate(heartbeat['restoring']).text}"
    tokens_per_s = f"{heartbeat['tokens_per_s']:.0f}" if heartbeat else None
    runs, host = heartbeat.get("runs"), heartbeat.get("host")
    last = worker.last_exit
    why = f"{minute(last['at'])}, restarts: {last['count']}, {last['reason']}" if last else None
    return worker.pool, worker.id, state, runs, tokens_per_s, host, why


def _workers(context: typer.Context) -> list[WorkerShown]:
    return WorkerList.model_validate(ask_admin(context, "GET", "workers")).workers


def _started(context: typer.Context, worker: WorkerShown) -> float:
    answer = ask_admin(context, "POST", "pools", worker.pool, "workers", worker.id, "selfcheck")
    return SelfCheckAsked.model_validate(answer).asked_at


def _results(context: typer.Context, checks: dict[tuple[str, str], float]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results of the requested checks so far."""
    found = {}
    for each in _workers(context):
        result = (each.heartbeat or {}).get("self_check")
        at = checks.get((each.pool, each.id))
        if at is not None and result and result["asked_at"] >= at:
            found[each.pool, each.id] = result
    return found


def _result_row(row: dict[str, Any]) -> Sequence[object]:
    if row["ok"] is None:
        return row["pool"], row["worker"], "no result in time", *[None] * 6
    result = "passed" if row["ok"] else "FAILED"
    found = (row.get(kind) for kind in (*CHECKS, "tolerance"))
    numbers = (None if each is None else f"{each:.1e}" for each in found)
    return row["pool"], row["worker"], result, *numbers, f"{row['took_s']:.2f} s"
