"""Lists of runs and checkpoints, newest first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from cotrain.wire.model import Name
from cotrain.wire.rest import CheckpointsListResponse, Cursor, TrainingRun, TrainingRunsResponse
from cotrain_server.http.dependencies import (
    Limit,
    Offset,
    Scope,
    ServicesDep,
    TenantDep,
    api_key,
)
from cotrain_server.http.tenant_routes import TenantRoute
from cotrain_server.views.records import checkpoint_of, training_run_of

if TYPE_CHECKING:
    from collections.abc import Mapping

router = APIRouter(
    prefix="/api/v1", tags=["lists"], route_class=TenantRoute, dependencies=[api_key]
)

_SDK = re.compile(r"AsyncTinker/Python (\d+)\.(\d+)\b.*")
#: SDKs before this one know no checkpoints of type `external`.
_FIRST_WITH_EXTERNAL = (0, 30)


@router.get("/training_runs")
async def list_training_runs(
    services: ServicesDep,
    tenant: TenantDep,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: Name | None = None,
) -> TrainingRunsResponse:
    """List your runs; with `accessible` also others', if something of theirs is published.

    With a `project_id`, yours in that project: those of other tenants are not in it.
    """
    catalog = services.catalog
    if access_scope == "accessible" and project_id is None:
        page = await catalog.accessible_runs(tenant.id, offset, limit)
    else:
        page = await catalog.runs(tenant.id, offset, limit, project_id)
    return TrainingRunsResponse(
        training_runs=[training_run_of(entry, tenant.id) for entry in page.items],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total_count),
    )


@router.get("/training_runs/{run_id}")
async def get_training_run(
    run_id: str, services: ServicesDep, tenant: TenantDep, access_scope: Scope = "owned"
) -> TrainingRun:
    """Show one run."""
    accessible = access_scope == "accessible"
    entry = await services.catalog.run(tenant.id, run_id, accessible=accessible)
    return training_run_of(entry, tenant.id)


@router.get("/training_runs/{run_id}/checkpoints")
async def list_checkpoints(
    run_id: str, request: Request, services: ServicesDep, tenant: TenantDep
) -> CheckpointsListResponse:
    """List a run's checkpoints; of another tenant's run, the published ones."""
    records = await services.catalog.checkpoints_of(tenant.id, run_id)
    hides_external = _hides_external(request.headers)
    return CheckpointsListResponse(
        checkpoints=[
            checkpoint_of(record)
            for record in records
            if not (hides_external and record.kind == "external_weights")
        ]
    )


@router.get("/checkpoints")
async def list_user_checkpoints(
    request: Request,
    services: ServicesDep,
    tenant: TenantDep,
    limit: Limit = 100,
    offset: Offset = 0,
) -> CheckpointsListResponse:
    """List the checkpoints of all your runs."""
    keep = _is_not_external if _hides_external(request.headers) else None
    page = await services.catalog.checkpoints(tenant.id, offset, limit, keep)
    return CheckpointsListResponse(
        checkpoints=[checkpoint_of(record) for record in page.items],
        cursor=Cursor(offset=offset, limit=limit, total_count=page.total_count),
    )


def _hides_external(headers: Mapping[str, str]) -> bool:
    """Tell whether a client is an SDK that could not read `external` in a list."""
    sdk = _SDK.fullmatch(headers.get("user-agent", ""))
    return sdk is not None and (int(sdk[1]), int(sdk[2])) < _FIRST_WITH_EXTERNAL


def _is_not_external(member: str) -> bool:
    return member.split("/")[1] != "external_weights"
