"""Pages of the server: overview, workers and settings.

The overview shows problems, pools and the busiest tenants. A tenant sees its own part.

The workers page shows runs, memory and drain state. The settings page shows the API process's
settings without secrets. Both are for the operator.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, SecretStr

from cotrain_server.services import Services
from cotrain_server.ui.data.activity import activity_of, own_activity_of
from cotrain_server.ui.data.problems import problems_of
from cotrain_server.ui.data.runs import busiest, targets_of, tokens_of_runs
from cotrain_server.ui.page import Page, PageRequest
from cotrain_server.views.server_status import brief_status, list_workers, own_status
from cotrain_store.messages.ids import PoolId, TenantId, WorkerId
from cotrain_store.messages.runs import Tenant
from cotrain_store.monitoring.failures import TenantFailures, recent_failures
from cotrain_store.monitoring.status import READ_AT_ONCE, Minute, busiest_tenants, cycle_records, last_minutes, owners
from cotrain_store.tenants.catalog import tenant_names
from cotrain_store.tenants.policies import read_pauses

TENANTS_SHOWN = 10
_KEPT = (
    "id", "base_model", "device", "dtype", "context_length", "max_rank", "sampler", "workers",
    "workers_known", "workers_unavailable", "open_cycles", "last_cycle", "queue", "samples",
)  # fmt: skip


async def read_overview(look: PageRequest) -> dict[str, Any]:
    """Return the page's data."""
    if look.visitor.tenant is not None:
        return await _own(look, look.visitor.tenant)
    services, now = look.services, look.now
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
    page = overview_of(status, hours, busiest, people, services.settings.disk_reserve_bytes, now)
    return {**page, "went_wrong": went_wrong(shown, people), "went_wrong_tenants": len(failures)}


def went_wrong(failures: Mapping[TenantId, TenantFailures], people: Mapping[TenantId, str]) -> list[dict[str, Any]]:
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


def overview_of(
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
            pool_of(pool, hours[PoolId(pool["id"])], now) for pool in status["pools"] if pool["id"] in hours
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


def pool_of(pool: Mapping[str, Any], minutes: Sequence[Minute], now: float) -> dict[str, Any]:
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


async def _own(look: PageRequest, tenant: Tenant) -> dict[str, Any]:
    services = look.services
    status = await own_status(services, tenant.id)
    records = await services.records.pools()
    hours = [await last_minutes(services.connection, record.id, look.now, tenant.id) for record in records]
    count, size = await services.checkpoints.stored_bytes(tenant.id)
    quotas = await services.quotas.of(tenant.id)
    pause = (await read_pauses(services.connection)).notice(tenant.id)
    failures = await recent_failures(services.connection, look.now)
    own = {tenant.id: failures[tenant.id]} if tenant.id in failures else {}
    return {
        "is_operator": False,
        "version": status["version"],
        "pools": [
            {**pool, "activity": own_activity_of(minutes, look.now)}
            for pool, minutes in zip(status["pools"], hours, strict=True)
        ],
        "paused": pause,
        "went_wrong": went_wrong(own, {tenant.id: "you"}),
        "went_wrong_tenants": len(own),
        "used": [
            _part("Checkpoints", size, quotas.checkpoint_bytes, f"{count:,} of {quotas.checkpoints:,}"),
            _part("Live runs' state", status["run_bytes"], quotas.run_bytes, ""),
            _part("Results not fetched", status["unread_bytes"], quotas.unread_bytes, ""),
        ],
    }


def _part(name: str, used: float, most: float, more: str) -> dict[str, Any]:
    """Return the bar of a quota. `most` is 0 without a fixed limit."""
    return {"name": name, "used": used, "most": most, "more": more}


OVERVIEW_PAGE = Page("/ui", "Overview", "overview.html", read_overview, poll_s=3)


async def read_workers(look: PageRequest) -> dict[str, Any]:
    """Return the page's data. Runs are listed only for workers whose runs can move."""
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


WORKERS_PAGE = Page("/ui/workers", "Workers", "workers.html", read_workers, poll_s=3, for_operator=True)


HIDDEN = "hidden"
_SECRET_WORDS = ("key", "password", "secret", "token")


async def read_settings(look: PageRequest) -> dict[str, Any]:
    """Return the page's data."""
    settings = look.services.settings
    defaults = {name: field.default for name, field in type(settings).model_fields.items()}
    return {
        "settings": [
            {
                "name": f"COTRAIN_{name.upper()}",
                "value": shown(name, getattr(settings, name)),
                "is_default": getattr(settings, name) == default,
            }
            for name, default in defaults.items()
        ]
    }


def shown(name: str, value: Any) -> str:
    """Return a setting as text without secrets."""
    if value is None or value == ():
        return ""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, tuple):
        return ", ".join(shown(name, each) for each in value)
    if isinstance(value, BaseModel):
        return " ".join(f"{quota}={number}" for quota, number in value)
    text = str(value)
    if isinstance(value, str) and any(word in name for word in _SECRET_WORDS):
        return HIDDEN
    parts = urlsplit(text) if "://" in text else None
    if parts and "@" in parts.netloc:
        where = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"{HIDDEN}@{where}").geturl()
    return text


SETTINGS_PAGE = Page("/ui/settings", "Settings", "settings.html", read_settings, for_operator=True)
