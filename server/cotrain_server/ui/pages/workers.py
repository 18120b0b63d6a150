"""Every worker: where its runs are, what it has memory for, and whether it is being drained; for the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_server.administration.workers import list_workers
from cotrain_server.ui.data.worker_runs import busiest, targets_of, tokens_of_runs
from cotrain_server.ui.page import Look, Page
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.monitoring.run_log import owners
from cotrain_store.monitoring.status import READ_AT_ONCE, cycle_records

if TYPE_CHECKING:
    from cotrain_server.services import Services


async def read(look: Look) -> dict[str, Any]:
    """Read the page's data; runs of those workers alone whose runs could go elsewhere."""
    workers = await list_workers(look.services)
    targets = {(each.pool, each.id): targets_of(each, workers) for each in workers}
    pools = {PoolId(pool) for (pool, _), others in targets.items() if others}
    runs = {pool: await _busiest(look.services, pool) for pool in pools}
    return {
        "workers": [
            {
                **each.model_dump(),
                "targets": targets[each.pool, each.id],
                "busiest": runs.get(PoolId(each.pool), {}).get(WorkerId(each.id), []),
            }
            for each in workers
        ],
        "cycles_read": READ_AT_ONCE,
    }


async def _busiest(services: Services, pool: PoolId) -> dict[WorkerId, list[dict[str, Any]]]:
    tokens = tokens_of_runs(await cycle_records(services.connection, pool, READ_AT_ONCE))
    return busiest(tokens, await owners(services.connection, pool, list(tokens)))


PAGE = Page("/ui/workers", "Workers", "workers.html", read, poll_s=3, for_operator=True)
