"""Changes to tenants by the operator: limits, weights and API keys."""

import json
import time
from contextlib import AsyncExitStack
from typing import Annotated, Any

from pydantic import Field, create_model

from cotrain.wire.admin import Change, KeyRequest, KeyShown, NewKey
from cotrain_server.quotas import Quotas
from cotrain_server.services import Services
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.fleet import LEAST_WEIGHT, MAX_WEIGHT, WEIGHT
from cotrain_store.messages.ids import TenantId
from cotrain_store.tenants.api_keys import KeyRecord, issued_key_id, new_api_key, new_tenant
from cotrain_store.tenants.audit_log import AuditEvent

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


DAY_S = 24 * 3600.0
_SHOWN = ("id", "tenant", "name", "role", "prefix", "created_at", "not_after")


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


async def list_keys(services: Services, tenant: TenantId | None = None) -> list[KeyShown]:
    """Return the keys of a tenant, or of all, oldest first."""
    uses = await services.tenants.last_uses()
    keys = await services.tenants.list_keys()
    return [_shown(key, uses.get(key.id)) for key in keys if tenant in (None, key.tenant)]


def _shown(key: KeyRecord, last_used_at: float | None) -> KeyShown:
    return KeyShown(
        **{name: getattr(key, name) for name in _SHOWN},
        source="settings" if key.in_settings else "keys create",
        last_used_at=last_used_at,
    )
