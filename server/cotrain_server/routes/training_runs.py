"""Lists of runs and checkpoints, newest first, and the history of a run."""

import re
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

from fastapi import Query, Request, Response

from cotrain.wire import rest as wire
from cotrain.wire.model import Name
from cotrain_server.http.tenant_routes import Limit, Offset, Scope, ServicesDep, TenantDep, tenant_router
from cotrain_server.views.records import checkpoint_of, csv_of, training_run_of
from cotrain_server.views.session_search import has_checkpoint, may_find, time_at, us_of
from cotrain_server.views.waiting import read_why
from cotrain_store.oplog.reader import oldest_rewind
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.history import read_history, read_metrics
from cotrain_store.tenants.lists import LabelQuery

router = tenant_router("lists")

_SDK = re.compile(r"AsyncTinker/Python (\d+)\.(\d+)\b.*")
AfterStep = Annotated[int, Query(ge=-1, lt=2**53)]
#: First SDK version that can read checkpoints of type `external`.
_FIRST_WITH_EXTERNAL = (0, 30)


@router.get("/training_runs")
async def list_training_runs(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Name | None = None,
    tag: Annotated[list[wire.Tag] | None, Query(max_length=16)] = None,
    text: Annotated[str | None, Query(min_length=1, max_length=1024)] = None,
) -> wire.TrainingRunsResponse:
    """List your runs; with `accessible`, also other tenants' runs that have a published checkpoint.

    The filters return only your own runs: those of a `project_id`, those with every `tag`
    (repeatable), and those with the words of `text` in their note.
    """
    catalog = services.catalog
    labels = LabelQuery(tuple(tag or ()), text or "")
    if labels:
        async with services.walks.of(tenant.id):
            found = await services.run_labels.matching(tenant.id, labels)
        page = await catalog.runs(tenant.id, offset, limit, project_id, found)
    elif access_scope == "accessible" and project_id is None:
        page = await catalog.accessible_runs(tenant.id, offset, limit)
    else:
        page = await catalog.runs(tenant.id, offset, limit, project_id)
    own = [entry.run for entry in page.items if entry.run.tenant == tenant.id]
    positions = await services.run_list.positions(own, time.time())
    return wire.TrainingRunsResponse(
        training_runs=[training_run_of(entry, tenant.id, positions.get(entry.run.id)) for entry in page.items],
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=page.total_count),
    )


@router.get("/training_runs/{run_id}")
async def get_training_run(
    run_id: str, services: ServicesDep, tenant: TenantDep, access_scope: Scope = "owned"
) -> wire.TrainingRun:
    """Show one run."""
    accessible = access_scope == "accessible"
    entry = await services.catalog.run(tenant.id, run_id, accessible=accessible)
    if entry.run.tenant != tenant.id:
        return training_run_of(entry, tenant.id)
    positions = await services.run_list.positions([entry.run], time.time())
    shown = training_run_of(entry, tenant.id, positions[entry.run.id])
    notice = await services.futures.gap_notice(entry.run.pool, entry.run.id)
    oldest = await oldest_rewind(services.connection, entry.run.pool, entry.run.id)
    return shown.model_copy(update={"waiting": notice, "rewind_from": oldest})


@router.get("/training_runs/{run_id}/why")
async def get_wait_reason(run_id: str, services: ServicesDep, tenant: TenantDep) -> wire.WaitReason:
    """Return the cause for which a run waits, in one sentence."""
    run = await services.records.run(tenant.id, run_id)
    positions = await services.run_list.positions([run], time.time())
    return await read_why(services, run, positions[run.id])


@router.patch("/training_runs/{run_id}")
async def update_training_run(
    run_id: str, changes: wire.UpdateTrainingRunRequest, services: ServicesDep, tenant: TenantDep
) -> wire.TrainingRun:
    """Set a run's note or tags, by which lists and searches find it."""
    run = await services.records.run(tenant.id, run_id)
    most = (await services.quotas.of(tenant.id)).record_bytes
    async with services.audit.act(tenant, AuditEvent.RUN_LABEL, {"run": run.id}):
        await services.run_labels.set(run, most, note=changes.note, tags=changes.tags)
    entry = await services.catalog.run(tenant.id, run_id, accessible=False)
    return training_run_of(entry, tenant.id)


@router.get(
    "/training_runs/{run_id}/history",
    response_model=wire.TrainingRunHistory,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def get_history(
    run_id: str,
    request: Request,
    services: ServicesDep,
    tenant: TenantDep,
    after_step: AfterStep = -1,
    format: Literal["json", "csv"] | None = None,
) -> wire.TrainingRunHistory | Response:
    """Return the results of a run's optimizer steps and evaluations after a given step.

    The format is CSV with `format=csv`, or if `Accept` contains text/csv.
    """
    run = await services.records.run(tenant.id, run_id)
    points = await read_history(services.connection, run.id, after_step)
    wants_csv = "text/csv" in request.headers.get("accept", "") if format is None else format == "csv"
    if wants_csv:
        return Response(csv_of(points), media_type="text/csv")
    metrics = await read_metrics(services.connection, run.id, after_step)
    return wire.TrainingRunHistory(training_run_id=run.id, points=points, metrics=metrics)


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(
    run_id: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> wire.CheckpointsListResponse:
    """List a run's checkpoints; for another tenant's run, only the published ones."""
    records = await services.catalog.checkpoints_of(tenant.id, run_id)
    hides_external = _hides_external(request.headers)
    runs = await services.catalog.runs_of(records)
    return wire.CheckpointsListResponse(
        checkpoints=[
            checkpoint_of(record, runs.get(record.run))
            for record in records
            if not (hides_external and record.kind == "external_weights")
        ]
    )


@router.get("/checkpoints")
async def list_user_checkpoints(
    request: Request, services: ServicesDep, tenant: TenantDep, limit: Limit = 100, offset: Offset = 0
) -> wire.CheckpointsListResponse:
    """List the checkpoints of all your runs."""
    keep = _is_not_external if _hides_external(request.headers) else None
    page = await services.catalog.checkpoints(tenant.id, offset, limit, keep)
    runs = await services.catalog.runs_of(page.items)
    return wire.CheckpointsListResponse(
        checkpoints=[checkpoint_of(record, runs.get(record.run)) for record in page.items],
        cursor=wire.Cursor(offset=offset, limit=limit, total_count=page.total_count),
    )


@router.post("/checkpoints/search")
async def search_checkpoints(
    wanted: wire.CheckpointSearchRequest, services: ServicesDep, tenant: TenantDep
) -> wire.CheckpointSearchResponse:
    """Find your checkpoints by exact metadata, type, base model and project, newest first."""
    if not may_find(wanted.owner, tenant.id):
        return wire.CheckpointSearchResponse(checkpoints=[])
    cursor = wanted.cursor
    after = (us_of(cursor.last_created_at), cursor.last_checkpoint_uuid) if cursor else None
    async with services.walks.of(tenant.id):
        found, position = await services.catalog.search_checkpoints(
            tenant.id, after, wanted.limit, partial(has_checkpoint, wanted)
        )
    next_cursor = None
    if position:
        next_cursor = wire.CheckpointSearchCursor(
            last_created_at=time_at(position[0]), last_checkpoint_uuid=position[1]
        )
    return wire.CheckpointSearchResponse(
        checkpoints=[checkpoint_of(record, run) for record, run in found], next_cursor=next_cursor
    )


def _hides_external(headers: Mapping[str, str]) -> bool:
    """Return True if a client is an SDK that cannot read `external` in a list."""
    sdk = _SDK.fullmatch(headers.get("user-agent", ""))
    return sdk is not None and (int(sdk[1]), int(sdk[2])) < _FIRST_WITH_EXTERNAL


def _is_not_external(member: str) -> bool:
    return member.split("/")[1] != "external_weights"
