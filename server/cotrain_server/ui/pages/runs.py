"""All runs, newest first: how each is, what it waits for, what it used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from cotrain_server.ui.data.runs import STATES, keeps, run_row
from cotrain_server.ui.page import Look, Page
from cotrain_store.messages.ids import TenantId
from cotrain_store.tenants.names import tenant_names
from cotrain_store.tenants.pauses import read_pauses

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNS_SHOWN = 50
_FILTERS = ("state", "base_model", "q", "tenant")


async def read(look: Look) -> dict[str, Any]:
    """Read one page of the list."""
    services = look.services
    asked = {name: look.query.get(name, "")[:200] for name in _FILTERS}
    tenant = look.visitor.tenant.id if look.visitor.tenant else None
    keep = keeps(asked["state"], asked["base_model"], asked["q"])
    whose = tenant or (TenantId(asked["tenant"]) if asked["tenant"] else None)
    cursor = look.query.get("after", "")[:200]
    page = await services.run_list.page(whose, cursor, RUNS_SHOWN, keep)
    positions = await services.run_list.positions(page.runs, look.now)
    names = await tenant_names(services.connection, {run.tenant for run in page.runs})
    pauses = await read_pauses(services.connection)
    return {
        "runs": [run_row(run, positions[run.id], pauses, names, look.now) for run in page.runs],
        "total_count": page.total_count,
        "next": _address(asked, page.next_cursor) if page.next_cursor else None,
        "is_first": not cursor,
        "asked": asked if tenant is None else {**asked, "tenant": ""},
        "is_narrowed": keep is not None or (tenant is None and bool(asked["tenant"])),
        "states": tuple(STATES),
        "base_models": sorted(pool.base_model for pool in await services.records.pools()),
        "address": look.address,
    }


def _address(asked: Mapping[str, str], cursor: str) -> str:
    given = {name: value for name, value in asked.items() if value}
    return "/ui/runs?" + urlencode({**given, "after": cursor})


PAGE = Page("/ui/runs", "Runs", "runs.html", read, poll_s=5)
