"""Overview: problems with their remedies, pools and the busiest tenants. A tenant sees its own part."""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from cotrain_server.administration import show_quotas
from cotrain_server.ui.charts import activity_of, own_activity_of
from cotrain_server.ui.number_format import duration, percent, plural, size
from cotrain_server.ui.page import Page, PageRequest
from cotrain_server.views.server_status import brief_status, own_status
from cotrain_store.messages.ids import PoolId, TenantId
from cotrain_store.messages.runs import Tenant
from cotrain_store.monitoring.failures import TenantFailures, recent_failures
from cotrain_store.monitoring.recent_activity import Minute, busiest_tenants, last_minutes
from cotrain_store.tenants.catalog import tenant_names
from cotrain_store.tenants.policies import read_pauses

TENANTS_SHOWN = 10
#: Parts of a pool's status on the page.
_KEPT = (
    "id", "base_model", "device", "dtype", "context_length", "max_rank", "sampler", "workers",
    "workers_known", "workers_unavailable", "open_cycles", "last_cycle", "queue", "samples",
)  # fmt: skip


#: Maximum wait of a pool's oldest op in normal operation.
OLDEST_OP_S = 60.0
OLDEST_GAP_S = 120.0
REDIS_MEMORY_PART = 0.7
#: Part of the disk that is free in normal operation.
DISK_FREE_PART = 0.05

_NO_WORKER = "Start one with cotrain serve or docker compose up worker. Its log has the reason of its end."
_HANGS = "Its process has ended or hangs; its log has the reason. End a process that hangs."
_RUNS_WAIT = "Its runs wait until it is back or another worker takes them."
_HELP: Sequence[tuple[str, str]] = (
    ("No worker for", _NO_WORKER),
    ("No worker is", _NO_WORKER),
    ("No scheduler", "Start one: nothing is planned without it. Accepted requests wait, and are not lost."),
    ("Redis does not", "Start it, or check COTRAIN_REDIS_URL. Clients wait, and continue."),
    ("Redis could lose", "Set `appendonly yes` and `appendfsync always`, or accept the loss with COTRAIN_ACCEPT_DATA_LOSS."),
    ("Redis", "Check the log of Redis and its disk. Clients wait, and continue."),
    ("The disk", "New requests are refused. Delete checkpoints, or make the disk of the data folder larger."),
    ("This process", "It is stopping. There is nothing to do."),
)  # fmt: skip


@partial(Page, "/ui", "Overview", "overview.html", poll_s=3)
async def overview(request: PageRequest) -> dict[str, Any]:
    """Return the operator's page, or a tenant's."""
    if request.visitor.tenant is not None:
        return await _own(request, request.visitor.tenant)
    services, now = request.services, request.now
    connection = services.connection
    names = [pool.id for pool in await services.records.pools()]
    # Concurrently, so that the reads share the connection's batches.
    status, failures, busiest, *minutes = await asyncio.gather(
        brief_status(services),
        recent_failures(connection, now),
        busiest_tenants(connection, names, now, TENANTS_SHOWN),
        *(last_minutes(connection, name, now) for name in names),
    )
    hours = dict(zip(names, minutes, strict=True))
    shown = dict(itertools.islice(failures.items(), TENANTS_SHOWN))
    people = await tenant_names(connection, {tenant for tenant, _ in busiest} | shown.keys())
    page = _overview_of(status, hours, busiest, people, services.settings.disk_reserve_bytes, now)
    return {**page, "went_wrong": _went_wrong(shown, people), "went_wrong_tenants": len(failures)}


def _went_wrong(failures: Mapping[TenantId, TenantFailures], people: Mapping[TenantId, str]) -> list[dict[str, Any]]:
    """Return the rows of tenants with failed or refused requests."""
    return [
        {
            **asdict(each),
            "tenant": tenant,
            "tenant_name": people.get(tenant, ""),
            "run": each.request.rpartition(":")[0] if ":train:" in each.request else "",
        }
        for tenant, each in failures.items()
    ]


def _overview_of(
    status: Mapping[str, Any],
    hours: Mapping[PoolId, Sequence[Minute]],
    busiest: Sequence[tuple[TenantId, float]],
    people: Mapping[TenantId, str],
    disk_reserve_bytes: int,
    now: float,
) -> dict[str, Any]:
    """Return the operator's page from `/status` and the counts of the last hour."""
    total_s = sum(seconds for _, seconds in busiest)
    return {
        "is_operator": True,
        "version": status["version"],
        "uptime_s": status["uptime_s"],
        "ready": status["ready"],
        "problems": [asdict(found) for found in problems_of(status, disk_reserve_bytes)],
        "pools": [  # a pool added during the read is shown the next time
            _pool_of(pool, hours[PoolId(pool["id"])], now) for pool in status["pools"] if pool["id"] in hours
        ],
        "tenants": [
            {
                "tenant": tenant,
                "tenant_name": people.get(tenant, ""),
                "device_s": seconds,
                "share": seconds / total_s if total_s else 0.0,
            }
            for tenant, seconds in busiest
        ],
        "redis": status["redis"],
        "disk": status["disk"],
    }


def _pool_of(pool: Mapping[str, Any], minutes: Sequence[Minute], now: float) -> dict[str, Any]:
    """Return the part of one pool, with the numbers of `/status`."""
    measured = sum(worker["tokens_per_s"] for worker in pool["workers"])
    tokens = pool["queue"]["tokens"]
    return {
        **{name: pool[name] for name in _KEPT},
        "measured_tokens_per_s": measured,
        "backlog_s": tokens / measured if measured else None,
        "tenants_waiting": pool["queue"]["tenants"],
        "activity": activity_of(minutes, len(pool["workers"]), now),
    }


async def _own(request: PageRequest, tenant: Tenant) -> dict[str, Any]:
    services = request.services
    status = await own_status(services, tenant.id)
    records = await services.records.pools()
    hours = [await last_minutes(services.connection, record.id, request.now, tenant.id) for record in records]
    count, size = await services.checkpoints.stored_bytes(tenant.id)
    limits = {quota.name: quota.limit for quota in await show_quotas(services, tenant.id)}
    pause = (await read_pauses(services.connection)).notice(tenant.id)
    failures = await recent_failures(services.connection, request.now)
    own = {tenant.id: failures[tenant.id]} if tenant.id in failures else {}
    return {
        "is_operator": False,
        "version": status["version"],
        "pools": [
            {**pool, "activity": own_activity_of(minutes, request.now)}
            for pool, minutes in zip(status["pools"], hours, strict=True)
        ],
        "paused": pause,
        "went_wrong": _went_wrong(own, {tenant.id: "you"}),
        "went_wrong_tenants": len(own),
        "used": [
            _part("Checkpoints", size, limits["checkpoint_bytes"], f"{count:,} of {limits['checkpoints']:,}"),
            _part("Live runs' state", status["run_bytes"], limits["run_bytes"], ""),
            _part("Results not fetched", status["unread_bytes"], limits["unread_bytes"], ""),
        ],
    }


def _part(name: str, used: float, most: float, more: str) -> dict[str, Any]:
    """Return the bar of a quota."""
    return {"name": name, "used": used, "most": most, "more": more}


@dataclass(frozen=True)
class Problem:
    """One health problem."""

    level: Literal["bad", "warn"]  # `bad`: a component does not run
    text: str
    todo: str
    run: str = ""  # the run that it concerns


def problems_of(status: Mapping[str, Any], disk_reserve_bytes: int) -> list[Problem]:
    """Return the problems, the worst first, from the operator's `/status`."""
    reasons = status["reasons"]
    if any(map(_exits, status["pools"])) and any(map(_is_of_workers, reasons)):
        # The remedy of a missing worker has the reason of its exits, so its crash loop has no problem of its own.
        reasons = [each for each in reasons if not each.startswith("worker-")]
    found = [Problem("bad", reason, _help(reason, status["pools"])) for reason in reasons]
    for pool in status["pools"]:
        found += _of_pool(pool, status["reasons"])
    found += _of_host(status, disk_reserve_bytes)
    return sorted(found, key=lambda problem: problem.level != "bad")


def _is_of_workers(reason: str) -> bool:
    return reason.startswith("No worker")


def _help(reason: str, pools: Sequence[Mapping[str, Any]]) -> str:
    if _is_of_workers(reason) and (exits := " ".join(map(_exits, pools)).strip()):
        return f"{exits} {_RUNS_WAIT}"
    return next(
        (text for start, text in _HELP if reason.startswith(start)),
        "Its log has the reason; cotrain serve starts it again.",
    )


def _of_pool(pool: Mapping[str, Any], reasons: Sequence[str]) -> Iterator[Problem]:
    name, alive = pool["base_model"], {worker["id"] for worker in pool["workers"]}
    reported = {f"No worker for {name} is running.", "No worker is running."}
    is_reported = not alive and not reported.isdisjoint(reasons)
    missing = [worker for worker in pool["workers_unavailable"] if worker not in alive]
    if missing and not is_reported:
        yield Problem(
            "bad" if not alive else "warn",
            f"{plural(len(missing), 'worker')} of {name} without a heartbeat: {', '.join(missing)}.",
            f"{_exits(pool) or _HANGS} {_RUNS_WAIT}",
        )
    for worker in pool["workers"]:
        if not worker["accepts_saves"]:
            yield Problem(
                "warn",
                f"Worker {worker['id']} of {name} writes saves slower than they arrive; saves wait.",
                "Use a faster disk for its data folder, or save less often.",
            )
    if pool["queue"]["oldest_s"] > OLDEST_OP_S:
        yield Problem(
            "warn",
            f"The oldest request of {name} has waited for {duration(pool['queue']['oldest_s'])}.",
            "The page Cycles shows if its worker is busy with other tenants or idle.",
        )
    if pool["queue"]["oldest_gap_s"] > OLDEST_GAP_S:
        yield Problem(
            "warn",
            f"A run of {name} has waited for a missing request for {duration(pool['queue']['oldest_gap_s'])}.",
            "Its client failed to send it. The requests after it fail after COTRAIN_GAP_LIMIT_S; other runs continue.",
            pool["queue"]["oldest_gap_run"],
        )


def _exits(pool: Mapping[str, Any]) -> str:
    """Return the last exits of the workers without a heartbeat; empty if none is known."""
    alive = {worker["id"] for worker in pool["workers"]}
    exits = pool.get("worker_exits", {})
    return " ".join(f"{name}: {each['text']}" for name, each in exits.items() if name not in alive)


def _of_host(status: Mapping[str, Any], disk_reserve_bytes: int) -> Iterator[Problem]:
    redis, disk = status["redis"], status["disk"]
    free_bytes, total_bytes = disk["free_bytes"], disk["total_bytes"]
    limit = redis["memory_limit_bytes"]
    if limit and redis["memory_bytes"] > REDIS_MEMORY_PART * limit:
        yield Problem(
            "warn",
            f"Redis uses {percent(redis['memory_bytes'] / limit)} of its memory.",
            "Raise its maxmemory before it is full: a full Redis rejects writes.",
        )
    low_bytes = max(2 * disk_reserve_bytes, DISK_FREE_PART * total_bytes)
    if disk_reserve_bytes < free_bytes < low_bytes:
        yield Problem(
            "warn",
            f"The disk has {size(free_bytes)} of {size(total_bytes)} left; "
            f"below {size(disk_reserve_bytes)} requests are refused.",
            "Delete checkpoints, or make the disk larger.",
        )
