"""Page of a tenant's checkpoints, newest first, with size, expiry, visibility and actions."""

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from cotrain_server.errors import Invalid
from cotrain_server.http.downloads import ARCHIVE
from cotrain_server.http.tenant_routes import ServicesDep
from cotrain_server.requests.checkpoint_validation import check_ttl, find_source
from cotrain_server.services import Services
from cotrain_server.signed_tokens import LINK_LIFE_S, Link
from cotrain_server.ui.access import Visitor, form_of
from cotrain_server.ui.page import Page, PageRequest
from cotrain_server.ui.rendering import page_router
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import CheckpointRecord
from cotrain_store.tenants.audit_log import Act, AuditEvent
from cotrain_store.tenants.catalog import offered_tenants, tenant_names

SHOWN = 50
_SHOWN = ("run", "name", "kind", "path", "base_model", "size", "created_at", "expires_at", "public")
DAY_S = 24 * 3600
#: Actions of a form: the event in the audit log, and the sentence of the page afterwards.
_ACTIONS: Mapping[str, tuple[AuditEvent, str]] = {
    "delete": (AuditEvent.CHECKPOINT_DELETE, "The checkpoint is deleted. What was loaded from it stays."),
    "publish": (
        AuditEvent.CHECKPOINT_PUBLISH,
        "Every tenant of this server may load, sample and download the checkpoint now.",
    ),
    "unpublish": (AuditEvent.CHECKPOINT_UNPUBLISH, "The checkpoint is its owner's alone again."),
    "ttl": (AuditEvent.CHECKPOINT_SET_TTL, "The checkpoint expires when you said."),
}

router = page_router()


@partial(Page, "/ui/checkpoints", "Checkpoints", "checkpoints.html")
async def checkpoints(request: PageRequest) -> dict[str, Any]:
    """Return the data of one page of a tenant's checkpoints."""
    services = request.services
    tenant, offset, is_operator = request.tenant, request.offset, request.visitor.is_operator
    _, done = _ACTIONS.get(request.query.get("done", ""), (None, ""))
    if not tenant:
        nothing = {"tenant": "", "tenant_name": "", "checkpoints": None, "next": None}
        return {**nothing, "tenants": await offered_tenants(services.connection), "done": done}
    page = await services.catalog.checkpoints(tenant, offset, SHOWN)
    names = await tenant_names(services.connection, {tenant})
    count, size = await services.checkpoints.stored_bytes(tenant)
    quotas = await services.quotas.of(tenant)
    more = offset + SHOWN < page.total_count
    given = {"tenant": tenant} if is_operator else {}
    return {
        "tenant": tenant,
        "tenants": await offered_tenants(services.connection) if is_operator else {},
        "tenant_name": names.get(tenant, ""),
        "checkpoints": [_row(checkpoint) for checkpoint in page.items],
        "total_count": page.total_count,
        "count": count,
        "size": size,
        "max_count": quotas.checkpoints,
        "max_size": quotas.checkpoint_bytes,
        "next": "/ui/checkpoints?" + urlencode({**given, "offset": offset + SHOWN}) if more else None,
        "done": done,
    }


@router.post("/ui/checkpoints")
async def change(request: Request, services: ServicesDep) -> Response:
    """Delete, publish, unpublish or expire a checkpoint."""
    visitor, fields = await form_of(request, services)
    tenant = _owner(visitor, fields)
    checkpoint = await services.records.checkpoint(tenant, fields.get("path", ""))
    names = (tenant, checkpoint.run, checkpoint.kind, checkpoint.name)
    do = fields.get("do", "")
    if do not in _ACTIONS:
        raise Invalid(f"do must be one of {', '.join(_ACTIONS)}.")
    ttl_s = _ttl_s(fields.get("days", "")) if do == "ttl" else None
    async with _audited(services, visitor, _ACTIONS[do][0], checkpoint):
        if do == "delete":
            await services.checkpoints.delete(*names)
        elif do == "ttl":
            await services.checkpoints.set_ttl(*names, ttl_s)
        else:
            await services.checkpoints.publish(*names, public=do == "publish")
    given = {"tenant": tenant} if visitor.is_operator else {}
    return RedirectResponse("/ui/checkpoints?" + urlencode({**given, "done": fields["do"]}), 303)


@router.post("/ui/checkpoints/download")
async def download(request: Request, services: ServicesDep) -> Response:
    """Redirect to an archive of the checkpoint's files, by a link that is valid for some minutes."""
    visitor, fields = await form_of(request, services)
    source = await find_source(services, _owner(visitor, fields), fields.get("path", ""))
    checkpoint, expires_at = source.checkpoint, int(time.time()) + LINK_LIFE_S
    link = Link(checkpoint.tenant, checkpoint.path, checkpoint.weights, ARCHIVE, expires_at)
    async with _audited(services, visitor, AuditEvent.CHECKPOINT_READ, checkpoint):
        signed = services.signer.sign_link(link)
    return RedirectResponse(f"/api/v1/files/{signed}/{ARCHIVE}", 303)


def _row(record: CheckpointRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _SHOWN}


def _owner(visitor: Visitor, fields: Mapping[str, str]) -> TenantId:
    """Return the owner of a form's checkpoints. For a tenant, always itself."""
    return visitor.tenant.id if visitor.tenant else TenantId(fields.get("tenant", ""))


def _audited(
    services: Services, visitor: Visitor, event: AuditEvent, checkpoint: CheckpointRecord
) -> AbstractAsyncContextManager[Act]:
    details = {"tinker_path": checkpoint.path}
    if visitor.tenant is None:
        return services.audit.act_of_operator(checkpoint.tenant, event, details)
    return services.audit.act(visitor.tenant, event, details)


def _ttl_s(days: str) -> int | None:
    """Return the number of days until a checkpoint expires, or None for no limit. Raises Invalid."""
    if not days.strip():
        return None
    if not days.strip().isdecimal() or len(days) > 6:
        raise Invalid("days must be a whole number of at least 1, or empty for never.")
    ttl_s = int(days) * DAY_S
    check_ttl(ttl_s)
    return ttl_s
