"""Who is asking: an API key, or a token that stands for one, names a tenant; the admin key names
the operator."""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from typing import TYPE_CHECKING

from cotrain_server.errors import InvalidToken
from cotrain_store.errors import AuthenticationFailed, InvalidKey
from cotrain_store.messages.sessions import Tenant

if TYPE_CHECKING:
    from starlette.requests import Request

    from cotrain_server.services import Services
    from cotrain_server.settings import ServerSettings


async def authenticate(request: Request, services: Services) -> Tenant:
    """Find the tenant of a request's `X-API-Key`, or of its `Authorization: Bearer`.

    Raises:
        InvalidKey, ExpiredKey, InvalidToken: no key and no token, or not a good one.
        TooManyFailures: and this address has shown too many of those.
    """
    return await identify(request, services, shown_key(request))


async def identify(request: Request, services: Services, credential: str) -> Tenant:
    """Find the tenant of some key or token that a request holds; raises as `authenticate` does."""
    try:
        return await _tenant_of(services, credential)
    except (AuthenticationFailed, InvalidToken) as error:
        # An expired token is no guess: a busy client shows one many times at once.
        if not (isinstance(error, InvalidToken) and error.expired):
            note_failure(request, services)
        raise


def note_failure(request: Request, services: Services) -> None:
    """Count a wrong key of this address; raises TooManyFailures where there were too many of those."""
    services.failures.note(request.client.host if request.client else "")


async def _tenant_of(services: Services, credential: str) -> Tenant:
    if not is_token(credential):
        return await services.tenants.authenticate(credential)
    token = services.signer.read_token(credential)
    if not await services.tenants.is_live(token.key_id):
        raise InvalidKey
    return Tenant(token.tenant, token.name)


def is_token(credential: str) -> bool:
    """Tell a token from an API key: it starts with `{"` in base64."""
    return credential.startswith("eyJ")


def exchanges_key(request: Request, settings: ServerSettings) -> bool:
    """Tell whether the client of this request shall exchange its key for a token.

    SDKs show nothing but a `tml-…` key or a token without an exchange.
    """
    credential = shown_key(request)
    if is_token(credential):
        return False
    return settings.jwt_auth == "always" or not credential.startswith("tml-")


def is_operator(request: Request, services: Services) -> bool:
    """Tell whether a request is the operator's: it shows the admin key."""
    return hmac.compare_digest(shown_key(request).encode(), services.admin_key.encode())


def shown_key(request: Request) -> str:
    """Read the key a request shows; empty where it shows none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return request.headers.get("x-api-key") or bearer


def is_local(request: Request) -> bool:
    """Tell whether a client seems to run on this host: enough for what is merely convenient there."""
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False
