"""Who is asking: an API key, or a token that stands for one, names a tenant; the admin key names
the operator."""

from __future__ import annotations

import hmac
import re
from ipaddress import ip_address

import structlog
from starlette.requests import Request

from cotrain_server.errors import InvalidToken, OperatorsOnly, ReadOnlyKey
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.errors import AuthenticationFailed, InvalidKey
from cotrain_store.messages.runs import Tenant

READS = ("GET", "HEAD")
#: What begins the id of a viewer's session. No record of such a session is kept.
UNKEPT_SESSION = "viewer-"
#: POSTs that a viewer may send. They read, or end a browser's session.
#: SDKs open, keep and finish a session around each read: these routes keep nothing for a viewer.
READING_POSTS = re.compile(
    rf"/api/v1/(auth/token|client/config|client/dynamic_config|create_session|session_heartbeat"
    rf"|sessions/{UNKEPT_SESSION}[^/]+/finish|telemetry|get_info|weights_info|sessions/search"
    r"|retrieve_future|retrieve_futures)|/ui/login|/ui/logout"
)


async def authenticate(request: Request, services: Services) -> Tenant:
    """Find the tenant of a request's `X-API-Key`, or of its `Authorization: Bearer`, and check its role.

    The tenant is `request.state.tenant` from then on.

    Raises:
        InvalidKey, ExpiredKey, InvalidToken: no key and no token, or not a good one.
        TooManyFailures: and this address has shown too many of those.
        ReadOnlyKey: the key is a viewer's, and the request changes something.
    """
    tenant = await identify(request, services, shown_key(request))
    request.state.tenant = tenant
    check_role(request, tenant)
    return tenant


async def identify(request: Request, services: Services, credential: str) -> Tenant:
    """Find the tenant of some key or token that a request holds; raises as `authenticate` does."""
    try:
        tenant = await _tenant_of(services, credential)
    except (AuthenticationFailed, InvalidToken) as error:
        # An expired token is no guess: a busy client shows one many times at once.
        if not (isinstance(error, InvalidToken) and error.expired):
            note_failure(request, services)
        raise
    services.credentials.learn(credential, tenant.id)
    structlog.contextvars.bind_contextvars(tenant=tenant.id)
    return tenant


def note_failure(request: Request, services: Services) -> None:
    """Count a wrong key of this address; raises TooManyFailures where there were too many of those."""
    services.failures.note(request.client.host if request.client else "")


async def _tenant_of(services: Services, credential: str) -> Tenant:
    if not is_token(credential):
        return await services.tenants.authenticate(credential)
    token = services.signer.read_token(credential)
    key = await services.tenants.live_key(token.key_id)
    if key is None:
        raise InvalidKey
    return Tenant(token.tenant, token.name, key.id, key.role)


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


def check_role(request: Request, tenant: Tenant) -> None:
    """Check that the role of a key allows a request; raises ReadOnlyKey.

    The one place that decides it, for keys, tokens and cookies. The path is the one that routes are found by.
    """
    is_read = request.method in READS or (
        request.method == "POST" and READING_POSTS.fullmatch(request.scope["path"])
    )
    if not (tenant.may_change or is_read):
        raise ReadOnlyKey


def check_operator(request: Request, services: Services) -> None:
    """Return where a request shows the admin key; raises OperatorsOnly, or TooManyFailures."""
    if not is_operator(request, services):
        note_failure(request, services)
        raise OperatorsOnly


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
