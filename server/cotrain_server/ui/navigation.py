"""Pages in the order of the navigation. A new page is one more line here."""

from collections.abc import Sequence

from fastapi import APIRouter

from cotrain_server.ui.page import Page
from cotrain_server.ui.pages import checkpoints, cycles, overview, playground, run, tenants

PAGES: Sequence[Page] = (
    overview.OVERVIEW_PAGE,
    cycles.PAGE,
    cycles.ONE,
    run.RUNS_PAGE,
    run.COMPARED,
    run.RUN_PAGE,
    checkpoints.PAGE,
    playground.PAGE,
    tenants.USAGE_PAGE,
    tenants.TENANTS_PAGE,
    tenants.TENANT_PAGE,
    overview.WORKERS_PAGE,
    tenants.AUDIT_PAGE,
    overview.SETTINGS_PAGE,
)
#: Routes besides pages: forms and downloads.
ROUTERS: Sequence[APIRouter] = (run.router, checkpoints.router, playground.router)
