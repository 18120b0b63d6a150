"""The keys of tenants: the members and viewers of a project."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from cotrain.wire.admin import KeyShown, NewKey
from cotrain_store.errors import KeyNotFound
from cotrain_store.tenants.audit_log import AuditEvent
from cotrain_store.tenants.key_format import issued_key_id, new_api_key, new_tenant

if TYPE_CHECKING:
    from cotrain.wire.admin import KeyRequest
    from cotrain_server.services import Services
    from cotrain_store.messages.ids import TenantId
    from cotrain_store.tenants.key_format import KeyRecord

DAY_S = 24 * 3600.0


async def make_key(services: Services, tenant: TenantId | None, wanted: KeyRequest) -> NewKey:
    """Make a key of a tenant, or of a new one; its secret is in the answer and nowhere else."""
    not_after = None if wanted.days is None else time.time() + wanted.days * DAY_S
    key, owner = new_api_key(wanted.prefix), tenant or new_tenant()
    key_id, audit = issued_key_id(key) or "", services.audit
    details = {"key_id": key_id, "name": wanted.name, "role": wanted.role}
    async with AsyncExitStack() as acts:
        if tenant is None:
            named = {"name": wanted.name}
            await acts.enter_async_context(
                audit.act_of_operator(owner, AuditEvent.TENANT_CREATE, named)
            )
        await acts.enter_async_context(
            audit.act_of_operator(owner, AuditEvent.APIKEY_CREATE, details)
        )
        await services.tenants.issue(
            wanted.name, tenant=owner, not_after=not_after, api_key=key, role=wanted.role
        )
    made = await services.tenants.issued_key(key_id)
    if made is None:
        raise KeyNotFound
    return NewKey(**_shown(made, None).model_dump(), key=key)


async def list_keys(services: Services, tenant: TenantId | None = None) -> list[KeyShown]:
    """List the keys of a tenant, or all, oldest first."""
    uses = await services.tenants.last_uses()
    keys = await services.tenants.list_keys()
    return [_shown(key, uses.get(key.id)) for key in keys if tenant in (None, key.tenant)]


async def revoke_key(services: Services, tenant: TenantId, key_id: str) -> None:
    """End a key of a tenant, and every token that stands for it; within five seconds everywhere.

    Raises:
        KeyNotFound: this tenant has none of this id.
        KeyInSettings: it is taken back there.
    """
    known = await services.tenants.issued_key(key_id)
    if known and known.tenant != tenant:
        raise KeyNotFound
    details = {"revoked": key_id, "name": known.name if known else ""}
    async with services.audit.act_of_operator(tenant, AuditEvent.APIKEY_REVOKE, details):
        if not await services.tenants.revoke(key_id) or not known:
            raise KeyNotFound


def _shown(key: KeyRecord, last_used_at: float | None) -> KeyShown:
    return KeyShown(
        id=key.id,
        tenant=key.tenant,
        name=key.name,
        role=key.role,
        prefix=key.prefix,
        source="settings" if key.in_settings else "keys create",
        created_at=key.created_at,
        not_after=key.not_after,
        last_used_at=last_used_at,
    )
