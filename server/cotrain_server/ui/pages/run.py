"""Pages of runs: one run, a comparison of several runs' curves, and the list of all runs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import Request, Response

from cotrain_server.errors import Invalid
from cotrain_server.http.tenant_routes import ServicesDep
from cotrain_server.services import Services
from cotrain_server.ui.access import Visitor, visitor_of
from cotrain_server.ui.charts import (
    MAX_COMPARED,
    curves_of,
    differing,
    evaluation_of,
    loss_by_rate,
    metric_charts,
    parallel_coordinates,
    settings_row,
)
from cotrain_server.ui.page import Page, PageRequest
from cotrain_server.ui.rendering import page_router
from cotrain_server.ui.run_tables import STATES, keeps, log_rows, run_row, targets_of
from cotrain_server.views.records import csv_of, mean_loss
from cotrain_server.views.server_status import list_workers
from cotrain_server.views.waiting import WaitState, brief_why, read_why
from cotrain_store.errors import RunNotFound
from cotrain_store.messages.fleet import Pauses
from cotrain_store.messages.ids import RunId
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, RunState
from cotrain_store.monitoring.fleet import read_pools
from cotrain_store.monitoring.recent_activity import READ_AT_ONCE, cycle_records, newest_ops
from cotrain_store.tenants.catalog import offered_tenants, tenant_names
from cotrain_store.tenants.history import read_history, read_metrics
from cotrain_store.tenants.policies import read_pauses
from cotrain_store.tenants.records import read_runs
from cotrain_store.tenants.run_labels import LabelQuery
from cotrain_store.tenants.run_list import RunPosition

OPS_SHOWN = 50
RUNS_SHOWN = 50
_FILTERS = ("state", "base_model", "q", "tenant")

router = page_router()


@partial(Page, "/ui/runs/{run_id}", "Run", "run.html", poll_s=5, in_navigation=False)
async def one_run(request: PageRequest) -> dict[str, Any]:
    """Return the data of one run."""
    services = request.services
    run = await _run_of(services, request.visitor, request.parts["run_id"])
    position = (await services.run_list.positions([run], request.now))[run.id]
    pauses = await read_pauses(services.connection)
    points = await read_history(services.connection, run.id)
    metrics = await read_metrics(services.connection, run.id)
    ops = await newest_ops(services.connection, run, position.accepted, OPS_SHOWN)
    cycles = await cycle_records(services.connection, run.pool, READ_AT_ONCE)
    checkpoints = await services.catalog.checkpoints_of(run.tenant, run.id)
    evaluation = evaluation_of(points)
    (row,) = await _rows(services, [run], {run.id: position}, pauses, request.now)
    # Of the newest seqs, those behind a gap may be missing.
    newest = min(row["requests_waiting"], OPS_SHOWN)
    row["requests_waiting"] -= newest - sum(op.seq > position.done for op in ops)
    if row["last_loss"] is None:  # the newest step followed a failed pass
        losses = (mean_loss(point) for point in reversed(points))
        row["last_loss"] = next((loss for loss in losses if loss is not None), None)
    # The same position as above, so that the sentence and the state agree.
    reason = await read_why(services, run, position, shows_exits=request.visitor.is_operator)
    log = log_rows(ops, cycles, run.id, position.planned, position.done)
    return {
        "run": row,
        "why": reason.reason,
        "is_live": run.state is RunState.LIVE,
        "pause": pauses.runs.get(run.id),
        "pool": run.pool,
        "session": run.session,
        "lora": run.lora,
        "user_metadata": run.user_metadata,
        "note": run.note,
        "worker": position.worker if request.visitor.is_operator else "",
        "targets": await _targets(services, run, position.worker) if request.visitor.is_operator else [],
        "weights_epoch": run.weights_epoch,
        "rolled_back_to": run.rolled_back_to,
        "done": position.done,
        "accepted": position.accepted,
        "points": len(points),
        "newest": position.newest,
        "charts": [*curves_of({run.id: points}), *([evaluation] if evaluation else []), *metric_charts(metrics)],
        "log": log,
        "has_older": any(row["cycle"] is None and row["seq"] <= position.done for row in log),
        "cycles_read": READ_AT_ONCE,
        "checkpoints": [_checkpoint_row(found) for found in checkpoints],
    }


def _checkpoint_row(record: CheckpointRecord) -> dict[str, Any]:
    """Return a checkpoint of a run for display."""
    names = ("name", "kind", "path", "size", "created_at", "expires_at", "public", "step")
    return {name: getattr(record, name) for name in names} | {"metrics": dict(record.metrics)}


@partial(Page, "/ui/compare", "Compare runs", "compare.html", in_navigation=False)
async def compared(request: PageRequest) -> dict[str, Any]:
    """Return the curves and the settings of several runs: those named, and those of a sweep."""
    named = [*request.query.getlist("run"), *await _runs_of_sweep(request)]
    wanted = list(dict.fromkeys(named))
    if len(wanted) > MAX_COMPARED:
        raise Invalid(f"run may occur at most {MAX_COMPARED} times, not {len(wanted)}.")
    runs = [await _run_of(request.services, request.visitor, name) for name in wanted]
    histories = {run.id: await read_history(request.services.connection, run.id) for run in runs}
    rows = [settings_row(run, histories[run.id]) for run in runs]
    labels = {run.id: row.label for run, row in zip(runs, rows, strict=True)}
    by_rate = loss_by_rate(rows)
    return {
        "runs": [{"run": r.id, "label": labels[r.id], "base_model": r.base_model, "rank": r.lora.rank} for r in runs],
        "by_rate": by_rate,
        "charts": curves_of(histories, labels),
        "coordinates": parallel_coordinates(rows),
        "settings": differing(rows),
        "rows": [asdict(row) for row in rows],
    }


async def _runs_of_sweep(request: PageRequest) -> list[str]:
    """Return the runs of the sweep in the address. The operator's address has the tenant, too."""
    name = request.query.get("sweep", "")[:64]
    if not name or not request.tenant:
        return []
    tagged = LabelQuery(tags=(f"sweep:{name}",))
    found = await request.services.run_labels.matching(request.tenant, tagged)
    return sorted(found, key=lambda run: (len(run), run))[:MAX_COMPARED]


@router.get("/ui/runs/{run_id}/history.csv")
async def csv(request: Request, run_id: str, services: ServicesDep) -> Response:
    """Send a run's history as a table."""
    run = await _run_of(services, await visitor_of(request, services), run_id)
    text = csv_of(await read_history(services.connection, run.id))
    name = f'attachment; filename="{run.id.replace(":", "-")}.csv"'
    return Response(text, media_type="text/csv", headers={"Content-Disposition": name})


async def _rows(
    services: Services, runs: Sequence[RunRecord], positions: Mapping[RunId, RunPosition], pauses: Pauses, now: float
) -> list[dict[str, Any]]:
    """Return the rows of runs at these positions."""
    names = await tenant_names(services.connection, {run.tenant for run in runs})
    pools = {pool.record.id: pool for pool in await read_pools(services.connection, with_queues=False)}
    rows = []
    for run in runs:
        position = positions[run.id]
        found = brief_why(WaitState(run, position, now, pauses, pools.get(run.pool)))
        rows.append(run_row(run, position, found, names.get(run.tenant, "")))
    return rows


async def _targets(services: Services, run: RunRecord, at: str | None) -> list[str]:
    """Return the workers to which a run can move; none before it has a worker."""
    found = await list_workers(services) if at else []
    here = [each for each in found if each.pool == run.pool and each.id == at]
    return targets_of(here[0], found) if here else []


async def _run_of(services: Services, visitor: Visitor, name: str) -> RunRecord:
    """Return a run: a tenant's own, or any for the operator. Raises RunNotFound."""
    if visitor.tenant is not None:
        return await services.records.run(visitor.tenant.id, name)
    found = await read_runs(services.connection, [RunId(name)])
    if not found:
        raise RunNotFound
    return found[0]


@partial(Page, "/ui/runs", "Runs", "runs.html", poll_s=5)
async def runs(request: PageRequest) -> dict[str, Any]:
    """Return the data of one page of the list."""
    services = request.services
    filters = {name: request.query.get(name, "")[:200] for name in _FILTERS}
    is_operator = request.visitor.is_operator
    keep = keeps(filters["state"], filters["base_model"], filters["q"])
    cursor = request.query.get("after", "")[:200]
    page = await services.run_list.page(request.tenant or None, cursor, RUNS_SHOWN, keep)
    positions = await services.run_list.positions(page.runs, request.now)
    pauses = await read_pauses(services.connection)
    return {
        "runs": await _rows(services, page.runs, positions, pauses, request.now),
        "total_count": page.total_count,
        "next": _address(filters, page.next_cursor) if page.next_cursor else None,
        "is_first": not cursor,
        "tenants": await offered_tenants(services.connection) if is_operator else {},
        "asked": filters if is_operator else {**filters, "tenant": ""},
        "is_narrowed": keep is not None or (is_operator and bool(filters["tenant"])),
        "states": tuple(STATES),
        "base_models": sorted(pool.base_model for pool in await services.records.pools()),
        "address": request.address,
    }


def _address(filters: Mapping[str, str], cursor: str) -> str:
    given = {name: value for name, value in filters.items() if value}
    return "/ui/runs?" + urlencode({**given, "after": cursor})
