"""The pages there are, in the order of the navigation. A new page is one more line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_server.ui.pages import (
    audit,
    checkpoints,
    cycles,
    overview,
    playground,
    run,
    runs,
    settings,
    tenant,
    tenants,
    usage,
    workers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import APIRouter

    from cotrain_server.ui.page import Page

PAGES: Sequence[Page] = (
    overview.PAGE,
    cycles.PAGE,
    cycles.ONE,
    runs.PAGE,
    run.COMPARED,
    run.PAGE,
    checkpoints.PAGE,
    playground.PAGE,
    usage.PAGE,
    tenants.PAGE,
    tenant.PAGE,
    workers.PAGE,
    audit.PAGE,
    settings.PAGE,
)
#: What pages have next to themselves: forms, downloads.
ROUTERS: Sequence[APIRouter] = (run.router, checkpoints.router, playground.router)
