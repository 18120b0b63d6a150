"""Authentication of requests: an API key, or a token issued for one, identifies a tenant. The admin
key identifies the operator.
"""

import hmac
import re
from ipaddress import ip_address

import structlog
from starlette.requests import Request

from cotrain_server.errors import InvalidToken
from cotrain_server.services import Services
from cotrain_server.settings import ServerSettings
from cotrain_store.errors import AuthenticationFailed, InvalidKey, Reason, Refused
from cotrain_store.messages.runs import Tenant

READS = ("GET", "HEAD")
#: Prefix of the session ids of viewers. The server stores no record of such a session.
VIEWER_SESSION = "viewer-"
#: POST routes that a viewer may call: they read, or end a browser session. SDKs open, keep and
#: finish a session around each read. These routes store nothing for a viewer.
READING_POSTS = re.compile(
    rf"/api/v1/(auth/token|client/config|client/dynamic_config|create_session|session_heartbeat"
    rf"|sessions/{VIEWER_SESSION}[^/]+/finish|telemetry|get_info|weights_info|(sessions|checkpoints)/search"
    r"|retrieve_future|retrieve_futures)|/anthropic/api/v1/messages/count_tokens"
    r"|/oai/api/v1/responses/input_tokens|/ui/login|/ui/logout"
)


async def authenticate(request: Request, services: Services) -> Tenant:
    """Return the tenant of a request's `X-API-Key` or `Authorization: Bearer`, and check its role.

    The tenant is also stored in `request.state.tenant`.

    Raises:
        InvalidKey, ExpiredKey, InvalidToken: the key or token is missing or invalid.
        TooManyFailures: the credential is invalid, and this address has sent too many invalid ones.
        READ_ONLY_KEY: the key belongs to a viewer, and the request changes something.
    """
    tenant = await identify(request, services, shown_key(request))
    request.state.tenant = tenant
    check_role(request, tenant)
    return tenant


async def identify(request: Request, services: Services, credential: str) -> Tenant:
    """Return the tenant of a key or token. Raises the same errors as `authenticate`, except READ_ONLY_KEY."""
    try:
        tenant = await _tenant_of(services, credential)
    except (AuthenticationFailed, InvalidToken) as error:
        # An expired token is not a guess: a busy client sends the same one many times at once.
        if not (isinstance(error, InvalidToken) and error.expired):
            count_wrong_key(request, services)
        raise
    structlog.contextvars.bind_contextvars(tenant=tenant.id)
    return tenant


def count_wrong_key(request: Request, services: Services) -> None:
    """Count a wrong key of this address. Raises TooManyFailures if there were too many."""
    services.wrong_keys.count(request.client.host if request.client else "")


async def _tenant_of(services: Services, credential: str) -> Tenant:
    if not is_token(credential):
        return await services.tenants.authenticate(credential)
    token = services.signer.read_token(credential)
    key = await services.tenants.live_key(token.key_id)
    if key is None:
        raise InvalidKey
    return Tenant(token.tenant, token.name, key.id, key.role)


def is_token(credential: str) -> bool:
    """Return True for a token, False for an API key: a token starts with `{"` in base64."""
    return credential.startswith("eyJ")


def exchanges_key(request: Request, settings: ServerSettings) -> bool:
    """Return True if the client of this request must exchange its key for a token.

    SDKs send only a `tml-…` key or a token without an exchange.
    """
    credential = shown_key(request)
    if is_token(credential):
        return False
    return settings.jwt_auth == "always" or not credential.startswith("tml-")


def check_role(request: Request, tenant: Tenant) -> None:
    """Raise READ_ONLY_KEY if the role of a key does not allow a request.

    This is the only place that decides it, for keys, tokens and cookies. The path is the one that the router matches.
    """
    is_read = request.method in READS or (request.method == "POST" and READING_POSTS.fullmatch(request.scope["path"]))
    if not (tenant.may_change or is_read):
        raise Refused(Reason.READ_ONLY_KEY)


def check_operator(request: Request, services: Services) -> None:
    """Check that a request has the admin key. Raises OPERATORS_ONLY, or TooManyFailures."""
    if not is_operator(request, services):
        count_wrong_key(request, services)
        raise Refused(Reason.OPERATORS_ONLY)


def is_operator(request: Request, services: Services) -> bool:
    """Return True if a request has the admin key."""
    return hmac.compare_digest(shown_key(request).encode(), services.admin_key.encode())


def shown_key(request: Request) -> str:
    """Return the key of a request, or "" if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return request.headers.get("x-api-key") or bearer


def is_local(request: Request) -> bool:
    """Return True if a client seems to run on this host. Sufficient only for conveniences, not for access."""
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False
