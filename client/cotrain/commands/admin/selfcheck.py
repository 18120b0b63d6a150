"""Command `cotrain selfcheck`: a check that no adapter reaches the results of another one, on live workers."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from cotrain.commands.admin.asking import AdminKey, Server, ask
from cotrain.commands.terminal import DEFAULT_DATA_DIR, AsJson, BaseUrl, DataDir, print_result, table
from cotrain.settings import DEFAULT_BASE_URL
from cotrain.wire.admin import SelfCheckAsked, WorkerList, WorkerShown

#: Interval in s between two requests for the results.
POLL_S = 1.0
#: Exit statuses: a check failed, or a worker gave no result in time.
FAILED, UNANSWERED = 1, 2
KINDS = ("logprobs", "gradients", "weights", "samples")


def selfcheck(
    context: typer.Context,
    worker: Annotated[list[str] | None, typer.Option(help="Only this worker; repeated: these. Otherwise all.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Wait so many seconds for the results.")] = 120.0,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    admin_key: AdminKey = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Check on live workers that an adapter alone and in a mix gives the same numbers.

    Each worker runs passes and samples of temporary adapters between two cycles. The exit status is 1 if a check failed,
    and 2 if a worker gave no result in time or none is live.
    """
    context.obj = Server(base_url, admin_key, data_dir)
    chosen = [each for each in _workers(context) if each.heartbeat and (not worker or each.id in worker)]
    asked = {(each.pool, each.id): _ask(context, each) for each in chosen}
    until = time.monotonic() + timeout_s
    found = _results(context, asked)
    while len(found) < len(asked) and time.monotonic() < until:
        time.sleep(POLL_S)
        found = _results(context, asked)
    rows = [{"pool": pool, "worker": name, **(found.get((pool, name)) or {"ok": None})} for pool, name in asked]
    columns = ("pool", "worker", "result", *KINDS, "limit", "took")
    problems = [f"{row['worker']}: {row['problem']}" for row in rows if row.get("problem")]
    print_result(rows, table(columns, map(_row, rows)), *problems, as_json=as_json)
    if any(row["ok"] is False for row in rows):
        raise typer.Exit(FAILED)
    if not rows or any(row["ok"] is None for row in rows):
        raise typer.Exit(UNANSWERED)


def _workers(context: typer.Context) -> list[WorkerShown]:
    return WorkerList.model_validate(ask(context, "GET", "workers")).workers


def _ask(context: typer.Context, worker: WorkerShown) -> float:
    answer = ask(context, "POST", "pools", worker.pool, "workers", worker.id, "selfcheck")
    return SelfCheckAsked.model_validate(answer).asked_at


def _results(context: typer.Context, asked: dict[tuple[str, str], float]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the results of the requested checks so far."""
    found = {}
    for each in _workers(context):
        result = (each.heartbeat or {}).get("self_check")
        at = asked.get((each.pool, each.id))
        if at is not None and result and result["asked_at"] >= at:
            found[each.pool, each.id] = result
    return found


def _row(row: dict[str, Any]) -> Sequence[object]:
    if row["ok"] is None:
        return row["pool"], row["worker"], "no result in time", *[None] * 6
    result = "passed" if row["ok"] else "FAILED"
    found = (row.get(kind) for kind in (*KINDS, "tolerance"))
    numbers = (None if each is None else f"{each:.1e}" for each in found)
    return row["pool"], row["worker"], result, *numbers, f"{row['took_s']:.2f} s"
