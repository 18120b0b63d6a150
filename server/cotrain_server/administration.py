"""Tenants for the operator: the list, one tenant in detail, and changes of limits, weights and API keys."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import Field, create_model

from cotrain.wire.admin import (
    Change,
    DayUsage,
    KeyRequest,
    KeyShown,
    NewKey,
    Pause,
    QuotaUse,
    TenantDetail,
    TenantList,
    TenantRow,
)
from cotrain_server.services import Services
from cotrain_server.views.usage import last_day, total_of
from cotrain_store import redis_keys
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.fleet import LEAST_WEIGHT, MAX_WEIGHT, WEIGHT
from cotrain_store.messages.fleet import Pause as StoredPause
from cotrain_store.messages.ids import TenantId
from cotrain_store.monitoring.failures import recent_failures
from cotrain_store.redis_client.connection import clock_ms
from cotrain_store.results.delivery_log import unread_bytes
from cotrain_store.tenants.api_keys import KeyRecord, issued_key_id, new_api_key, new_tenant
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.policies import default_quota, read_pauses, read_policy
from cotrain_store.tenants.quotas import Quotas
from cotrain_store.usage import UsageRow

DAYS_SHOWN = 14
DAY_S = 24 * 3600.0
_SHOWN = ("id", "tenant", "name", "role", "prefix", "created_at", "not_after")
_OF_QUOTAS: dict[str, Any] = {
    name: (Annotated[int, *field.metadata] | None, None) for name, field in Quotas.model_fields.items()
}
OwnLimits = create_model("OwnLimits", __base__=Change, **_OF_QUOTAS)
"""Limit for each quota of `COTRAIN_QUOTAS`; null restores the default."""


class TenantChange(Change):
    """Partial update. Omitted fields keep their values."""

    limits: OwnLimits = OwnLimits()
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MAX_WEIGHT)] | None = None
    """Share of a contended cycle relative to a tenant with weight 1; null is 1."""


async def find_tenant(services: Services, asked_for: str) -> TenantId:
    """Return the id of an existing tenant. Raises TENANT_NOT_FOUND."""
    tenant = TenantId(asked_for)
    if not await services.tenants.is_known(tenant):
        raise Refused(Reason.TENANT_NOT_FOUND)
    return tenant


async def list_tenants(services: Services, search: str, offset: int, limit: int) -> TenantList:
    """List the tenants whose name or id contains a text, by name. Only the tenants of the page are read in detail."""
    rows = await services.connection.hgetall(redis_keys.tenant_names())
    names = {TenantId(tenant.decode()): name.decode() for tenant, name in rows.items()}
    wanted = search.casefold()
    found = sorted(
        (name.casefold(), tenant) for tenant, name in names.items() if wanted in name.casefold() or wanted in tenant
    )
    ids = [tenant for _, tenant in found[offset : offset + limit]]
    return TenantList(
        tenants=await _rows(services, {tenant: names[tenant] for tenant in ids}),
        total=len(found),
        offset=offset,
        limit=limit,
    )


async def show_tenant(services: Services, tenant: TenantId) -> TenantDetail:
    """Return all details of a tenant that is known to exist."""
    name = await services.connection.hget(redis_keys.tenant_names(), tenant)
    (row,) = await _rows(services, {tenant: name.decode() if name else ""})
    pauses = await read_pauses(services.connection)
    return TenantDetail(
        **row.model_dump(),
        quotas=await show_quotas(services, tenant),
        usage=await show_usage(services, tenant),
        keys=await list_keys(services, tenant),
        paused_runs={run: _pause(pause) for run, pause in pauses.runs.items() if pause.tenant == tenant},
    )


async def _rows(services: Services, names: Mapping[TenantId, str]) -> list[TenantRow]:
    policy = await read_policy(services.connection)
    failures = await recent_failures(services.connection, time.time())
    pools = await services.records.pools()
    pipeline = services.connection.pipeline(transaction=False)
    for tenant in names:
        pipeline.scard(redis_keys.tenant_runs(tenant))
        pipeline.zscore(redis_keys.run_bytes(), tenant)
        for pool in pools:
            pipeline.hmget(redis_keys.queue(pool.id, tenant), ["ops", "tokens"])
            pipeline.hmget(redis_keys.sample_load(pool.id, tenant), ["waiting", "running"])
    answers = await pipeline.execute()
    size = 2 + 2 * len(pools)
    rows = []
    for at, (tenant, name) in enumerate(names.items()):
        runs, size_bytes, *queued = answers[at * size : (at + 1) * size]
        paused = policy.pauses.tenants.get(tenant)
        wrong = failures.get(tenant)
        rows.append(
            TenantRow(
                id=tenant,
                name=name,
                weight=policy.weights.get(tenant, WEIGHT),
                paused=_pause(paused) if paused else None,
                runs=runs,
                run_bytes=int(size_bytes or 0),
                ops=sum(int(queue[0] or 0) for queue in queued[::2]),
                tokens=sum(int(queue[1] or 0) for queue in queued[::2]),
                samples=sum(int(count or 0) for load in queued[1::2] for count in load),
                failed=wrong.failed if wrong else 0,
                refused=wrong.refused if wrong else 0,
            )
        )
    return rows


def _pause(pause: StoredPause) -> Pause:
    return Pause(since=pause.since, reason=pause.reason)


async def show_quotas(services: Services, tenant: TenantId) -> list[QuotaUse]:
    """Return each limit of a tenant, and its current use."""
    own = await services.policies.limits(tenant)
    defaults = services.quotas.defaults.model_dump()
    if not defaults["run_bytes"]:
        defaults["run_bytes"] = default_quota(await services.records.pools())
    used = await _used(services, tenant)
    return [
        QuotaUse(
            name=name,
            limit=own.get(name) or defaults[name],
            default=defaults[name],
            is_own=name in own,
            used=used.get(name, 0),
        )
        for name in Quotas.model_fields
    ]


async def _used(services: Services, tenant: TenantId) -> dict[str, int]:
    """Return the use of each limit. For limits per pool, that of the fullest pool."""
    redis = services.connection
    now_ms = await clock_ms(redis)
    pipeline = redis.pipeline(transaction=False)
    pipeline.scard(redis_keys.tenant_runs(tenant))
    pipeline.zscore(redis_keys.run_bytes(), tenant)
    pipeline.get(redis_keys.record_bytes(tenant))
    pipeline.zcount(redis_keys.living_sessions(tenant), int(time.time() * 1000), "+inf")
    pipeline.zcount(redis_keys.tenant_samplers(tenant), now_ms, "+inf")
    pipeline.hget(redis_keys.sampler_bytes(tenant), "bytes")
    pipeline.hget(redis_keys.history_points(tenant), "points")
    pools = await services.records.pools()
    for pool in pools:
        pipeline.hmget(redis_keys.queue(pool.id, tenant), ["ops", "tokens", "bytes"])
        pipeline.hmget(redis_keys.sample_load(pool.id, tenant), ["waiting", "running", "tokens"])
    answers = [_number(answer) for answer in await pipeline.execute()]
    names = (
        "runs", "run_bytes", "record_bytes", "sessions", "samplers", "sampler_bytes", "history_points",
    )  # fmt: skip
    own, of_pools = answers[: len(names)], answers[len(names) :]
    used: defaultdict[str, int] = defaultdict(int, zip(names, map(sum, own), strict=True))
    for ops, samples in zip(of_pools[::2], of_pools[1::2], strict=True):
        of_pool = dict(zip(("ops", "tokens", "bytes"), ops, strict=True))
        of_pool |= {"samples": samples[0] + samples[1], "sample_tokens": samples[2]}
        for name, count in of_pool.items():
            used[name] = max(used[name], count)
    used["unread_bytes"] = (await unread_bytes(redis, [tenant]))[tenant]
    used["checkpoints"], used["checkpoint_bytes"] = await services.checkpoints.stored_bytes(tenant)
    used["polls"] = services.polls_by_tenant[tenant]
    return dict(used)


def _number(answer: Any) -> list[int]:
    """Read numbers of a hash, or one number, as Redis writes them."""
    row = answer if isinstance(answer, list) else [answer]
    return [int(float(value or 0)) for value in row]


async def show_usage(services: Services, tenant: TenantId) -> list[DayUsage]:
    """Return a tenant's usage on each of the last days, oldest first."""
    now = datetime.now(UTC)
    start = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=DAYS_SHOWN - 1)
    hours = await services.usage.rows(tenant, start, last_day(now).end)
    by_day: dict[str, list[UsageRow]] = {f"{start + timedelta(days=day):%Y-%m-%d}": [] for day in range(DAYS_SHOWN)}
    for row in hours:
        by_day[f"{row.hour:%Y-%m-%d}"].append(row)
    return [DayUsage(day=day, amounts=total_of(rows)) for day, rows in by_day.items()]


async def change_tenant(services: Services, tenant: TenantId, change: TenantChange) -> None:
    """Set limits and weight. They take effect in every API process and in the next cycle within 1 s."""
    limits: dict[str, int | None] = change.limits.model_dump(exclude_unset=True)
    if limits:
        details = {"limits": json.dumps(limits)}
        async with services.audit.act_of_operator(tenant, AuditEvent.TENANT_LIMITS, details):
            await services.policies.set_limits(tenant, limits)
        services.quotas.forget(tenant)
    if "weight" in change.model_fields_set:
        weight = WEIGHT if change.weight is None else change.weight
        weighed = {"weight": weight}
        async with services.audit.act_of_operator(tenant, AuditEvent.TENANT_WEIGHT, weighed):
            await services.policies.set_weight(tenant, weight)


async def make_key(services: Services, tenant: TenantId | None, wanted: KeyRequest) -> NewKey:
    """Create a key for a tenant, or for a new one. Only the answer contains its secret."""
    not_after = None if wanted.days is None else time.time() + wanted.days * DAY_S
    key, owner = new_api_key(wanted.prefix), tenant or new_tenant()
    key_id, audit = issued_key_id(key) or "", services.audit
    details = {"key_id": key_id, "name": wanted.name, "role": wanted.role}
    async with AsyncExitStack() as acts:
        if tenant is None:
            named = {"name": wanted.name}
            await acts.enter_async_context(audit.act_of_operator(owner, AuditEvent.TENANT_CREATE, named))
        await acts.enter_async_context(audit.act_of_operator(owner, AuditEvent.APIKEY_CREATE, details))
        await services.tenants.issue(wanted.name, tenant=owner, not_after=not_after, api_key=key, role=wanted.role)
    made = await services.tenants.issued_key(key_id)
    if made is None:
        raise Refused(Reason.KEY_NOT_FOUND)
    return NewKey(**_shown(made, None).model_dump(), key=key)


async def list_keys(services: Services, tenant: TenantId) -> list[KeyShown]:
    """Return the keys of a tenant, oldest first."""
    uses = await services.tenants.last_uses()
    keys = await services.tenants.list_keys()
    return [_shown(key, uses.get(key.id)) for key in keys if key.tenant == tenant]


def _shown(key: KeyRecord, last_used_at: float | None) -> KeyShown:
    return KeyShown(
        **{name: getattr(key, name) for name in _SHOWN},
        source="settings" if key.in_settings else "keys create",
        last_used_at=last_used_at,
    )
