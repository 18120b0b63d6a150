"""Endpoints auth/token and auth/apikey/me: exchange a key for a token, describe and revoke the key."""

import hashlib
import time

from fastapi import Request

from cotrain.wire.checkpoints import ApiKeyResponse, KeyDetails, OrganizationDetails, UserDetails
from cotrain.wire.sessions import AuthTokenResponse
from cotrain_server.http.auth import is_token, shown_key
from cotrain_server.http.tenant_routes import ServicesDep, tenant_router
from cotrain_server.services import Services
from cotrain_server.signed_tokens import Token
from cotrain_store.errors import InvalidKey, Reason, Refused
from cotrain_store.messages.runs import Tenant
from cotrain_store.tenants.api_keys import KeyRecord
from cotrain_store.tenants.audit_log import AuditEvent

router = tenant_router("auth", "/api/v1/auth")


@router.post("/token")
async def exchange(request: Request, services: ServicesDep) -> AuthTokenResponse:
    """Return a token that replaces the sent API key for one hour, or until the key is revoked."""
    key = await _shown(request, services)
    token = Token(key.tenant, key.id, key.name)
    return AuthTokenResponse(jwt=services.signer.make_token(token, time.time()))


@router.get("/apikey/me")
async def show_key(request: Request, services: ServicesDep) -> ApiKeyResponse:
    """Describe the sent API key. This server has tenants, but no users within them."""
    key = await _shown(request, services)
    return ApiKeyResponse(
        key_id=_number(key.id),
        name=key.name,
        note="in the server's settings" if key.in_settings else f"cotrain keys revoke {key.id}",
        details=KeyDetails(org_details=OrganizationDetails(name=key.tenant), user_details=UserDetails(email=key.name)),
    )


@router.delete("/apikey/me", status_code=204)
async def revoke_key(request: Request, services: ServicesDep) -> None:
    """Revoke the sent API key and every token issued for it, effective within 5 s.

    Other keys of the same tenant stay valid. A key in the server's settings cannot be revoked here,
    and stays valid while it is configured.
    """
    key = await _shown(request, services)
    if key.in_settings:
        raise Refused(Reason.KEY_OF_THE_OPERATOR)
    owner = Tenant(key.tenant, key.name, key.id)
    async with services.audit.act(owner, AuditEvent.APIKEY_REVOKE, {"key_id": key.id}):
        await services.tenants.revoke(key.id)


async def _shown(request: Request, services: Services) -> KeyRecord:
    """Return the key of a request. A token can neither issue tokens nor revoke its key."""
    credential = shown_key(request)
    if is_token(credential):
        raise InvalidKey("Show the API key itself here, not a token.")
    return await services.tenants.key(credential)


def _number(key_id: str) -> int:
    """Return a number for a key's id, because the SDK's CLI stores it as a number."""
    return int.from_bytes(hashlib.sha256(key_id.encode()).digest()[:6])
