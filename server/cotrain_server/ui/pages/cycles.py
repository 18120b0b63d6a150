"""Pages of cycles: the work of each worker per cycle, by tenant."""

from collections.abc import Sequence
from typing import Any

from cotrain_server.errors import Invalid
from cotrain_server.ui.access.session import Visitor
from cotrain_server.ui.data.cycles import Eyes, cycle_of, runs_of, timeline_of
from cotrain_server.ui.page import Page, PageRequest
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import PoolId, TenantId
from cotrain_store.monitoring.status import cycle_record, cycle_records
from cotrain_store.tenants.catalog import tenant_names

CHOICES = (20, 40, 100)


async def read(look: PageRequest) -> dict[str, Any]:
    """Return the data of the last cycles of one pool."""
    pools = await look.services.records.pools()
    count = chosen_count(look.query.get("last", ""))
    named = (pool for pool in pools if pool.id == look.query.get("pool", ""))
    pool = next(named, pools[0] if pools else None)
    found: dict[str, Any] = {
        "pools": [{"id": each.id, "base_model": each.base_model} for each in pools],
        "pool": pool.id if pool else "",
        "last": count,
        "choices": CHOICES,
        "timeline": None,
    }
    if pool is None:
        return found
    records = await cycle_records(look.services.connection, pool.id, count)
    return {**found, "timeline": timeline_of(records, await _eyes(look, records))}


async def read_one(look: PageRequest) -> dict[str, Any]:
    """Return the data of one cycle."""
    pool, number = PoolId(look.parts["pool"]), look.parts["cycle"]
    known = {each.id: each for each in await look.services.records.pools()}
    if pool not in known or not number.isdecimal() or len(number) > 15:
        raise Refused(Reason.CYCLE_NOT_KEPT)
    record = await cycle_record(look.services.connection, pool, int(number))
    if record is None:
        raise Refused(Reason.CYCLE_NOT_KEPT)
    eyes = await _eyes(look, [record])
    return {
        "pool": pool,
        "base_model": known[pool].base_model,
        "cycle": cycle_of(record, eyes),
        "runs": runs_of(record, eyes),
    }


def chosen_count(wanted: str) -> int:
    """Return the requested number of cycles. Raises Invalid."""
    if not wanted:
        return CHOICES[1]
    if not wanted.isdecimal() or int(wanted) not in CHOICES:
        raise Invalid(f"last must be one of {', '.join(map(str, CHOICES))}.")
    return int(wanted)


async def _eyes(look: PageRequest, records: Sequence[dict[str, Any]]) -> Eyes:
    visitor: Visitor = look.visitor
    if visitor.tenant is not None:
        return Eyes(visitor.tenant.id, {visitor.tenant.id: "you"})
    ids = {TenantId(run["tenant"]) for record in records for run in record["runs"]}
    names = await tenant_names(look.services.connection, ids)
    return Eyes(None, {str(tenant): name for tenant, name in names.items()})


PAGE = Page("/ui/cycles", "Cycles", "cycles.html", read, poll_s=4)
ONE = Page("/ui/cycles/{pool}/{cycle}", "Cycle", "cycle.html", read_one, in_navigation=False)
