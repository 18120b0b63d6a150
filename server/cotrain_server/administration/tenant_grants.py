"""What a tenant may have and how it is served: limits over the defaults, a weight, a pause."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from cotrain.wire.admin import Change
from cotrain_server.settings import Quotas
from cotrain_store.errors import TenantNotFound
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.pauses import LEAST_WEIGHT, MOST_WEIGHT, WEIGHT
from cotrain_store.tenants.audit_log import AuditEvent

if TYPE_CHECKING:
    from cotrain_server.services import Services

_OF_QUOTAS: dict[str, Any] = {
    name: (Annotated[int, *field.metadata] | None, None)
    for name, field in Quotas.model_fields.items()
}
OwnLimits = create_model("OwnLimits", __base__=Change, **_OF_QUOTAS)
"""A limit for each quota of `COTRAIN_QUOTAS`; null takes it back to the default."""


class TenantChange(Change):
    """What is to be other than it was; what is not named stays."""

    limits: OwnLimits = OwnLimits()
    weight: Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] | None = None
    """Its share of a contended cycle over that of a tenant with weight 1; null is 1."""


async def find_tenant(services: Services, asked_for: str) -> TenantId:
    """Name a tenant that there is; raises TenantNotFound."""
    tenant = TenantId(asked_for)
    if not await services.tenants.is_known(tenant):
        raise TenantNotFound
    return tenant


async def change_tenant(services: Services, tenant: TenantId, change: TenantChange) -> None:
    """Set limits and weight; they hold in every API process and in the next cycle within a second."""
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


async def pause_tenant(services: Services, tenant: TenantId, reason: str) -> None:
    """Hold a tenant back: what it sends is accepted up to its limits, and waits."""
    details = {"reason": reason}
    async with services.audit.act_of_operator(tenant, AuditEvent.TENANT_PAUSE, details):
        await services.pauses.pause_tenant(tenant, reason)


async def resume_tenant(services: Services, tenant: TenantId) -> None:
    """Let a tenant go on. Twice is harmless."""
    async with services.audit.act_of_operator(tenant, AuditEvent.TENANT_RESUME, {}) as act:
        act.is_done = await services.pauses.resume_tenant(tenant)
