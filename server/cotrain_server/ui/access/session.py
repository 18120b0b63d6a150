"""Browser sessions: a signed cookie that replaces the key after a login, and access checks of pages.

The cookie contains no key. A logout ends it. A tenant's session ends with its key, and has the key's current role. The
operator's session ends if the admin key changes.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fastapi import Request, Response

from cotrain_server.errors import BodyTooLarge, NotLoggedIn
from cotrain_server.http.auth import authenticate, check_role, is_operator, shown_key
from cotrain_server.services import Services
from cotrain_server.signed_tokens import UiSession
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.runs import Tenant

COOKIE = "cotrain_session"
#: Set before the login, so that no other site can log a browser in.
LOGIN_COOKIE = "cotrain_login"
#: Names of the CSRF token in forms and in htmx requests.
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"
PATH = "/ui"
LIFE_S = 12 * 3600


@dataclass(frozen=True)
class Visitor:
    """Visitor of a page: the operator, or a tenant, who sees only its own part."""

    tenant: Tenant | None  # None for the operator
    csrf: str  # token of its forms; empty if an API key was sent instead of a cookie

    @property
    def is_operator(self) -> bool:
        """True if the visitor is the operator, who sees everything."""
        return self.tenant is None

    @property
    def name(self) -> str:
        """Display name for the page's corner."""
        return self.tenant.name if self.tenant else "Operator"


async def session_of_key(services: Services, key: str) -> UiSession:
    """Open a session for the admin key or a tenant's; raises InvalidKey or ExpiredKey."""
    nonce, ends_at = secrets.token_hex(16), int(time.time()) + LIFE_S
    if hmac.compare_digest(key.encode(), services.admin_key.encode()):
        return UiSession(nonce, ends_at, "", _fingerprint(services.admin_key), "")
    record = await services.tenants.key(key)
    return UiSession(nonce, ends_at, record.tenant, record.id, record.name)


async def visitor_of_cookie(request: Request, services: Services) -> Visitor | None:
    """Return the logged-in visitor of a browser, or None without a valid session. Raises READ_ONLY_KEY: the session is
    a viewer's, and the request changes something.
    """
    session = _session_of(request, services)
    if session is None or await services.tenants.has_logged_out(session.nonce):
        return None
    csrf = services.signer.csrf(session.nonce)
    if not session.tenant:
        is_same = hmac.compare_digest(session.key_id, _fingerprint(services.admin_key))
        return Visitor(None, csrf) if is_same else None
    key = await services.tenants.live_key(session.key_id, cache_s=0.0)
    if key is None:
        return None
    tenant = Tenant(key.tenant, session.name, key.id, key.role)
    check_role(request, tenant)
    return Visitor(tenant, csrf)


async def end_session(request: Request, services: Services) -> None:
    """End the session of a request's cookie in all API processes."""
    session = _session_of(request, services)
    if session is not None:
        await services.tenants.log_out(session.nonce, session.ends_at)


def keep_session(request: Request, response: Response, services: Services, session: UiSession) -> None:
    """Set a browser's session cookie."""
    value = services.signer.sign_session(session)
    set_cookie(request, response, services, COOKIE, value, LIFE_S)
    response.delete_cookie(LOGIN_COOKIE, path=PATH)


def set_cookie(request: Request, response: Response, services: Services, name: str, value: str, life_s: int) -> None:
    """Set a cookie that scripts cannot read and other sites cannot send, limited to HTTPS if the server uses it."""
    public = services.settings.public_url or ""
    response.set_cookie(
        name,
        value,
        max_age=life_s,
        path=PATH,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https" or public.startswith("https:"),
    )


def drop_session(response: Response) -> None:
    """Delete a browser's session cookie."""
    response.delete_cookie(COOKIE, path=PATH)


def is_csrf_token(expected: str, shown: str) -> bool:
    """Return True if a request has its session's token."""
    return bool(expected) and hmac.compare_digest(expected.encode(), shown.encode())


def _session_of(request: Request, services: Services) -> UiSession | None:
    return services.signer.read_session(request.cookies.get(COOKIE, ""), time.time())


def _fingerprint(admin_key: str) -> str:
    return hashlib.sha256(b"cotrain ui " + admin_key.encode()).hexdigest()


#: Maximum size of a form, including a playground prompt.
FORM_BYTES = 256 * 1024


async def visitor_of(request: Request, services: Services) -> Visitor:
    """Return the visitor of a page or its JSON twin, by its cookie or by a key as in the API.

    Raises:
        NotLoggedIn: neither was sent.
        InvalidKey, ExpiredKey, InvalidToken, TooManyFailures: as in the API.
    """
    if shown_key(request):
        if is_operator(request, services):
            return Visitor(None, "")
        return Visitor(await authenticate(request, services), "")
    visitor = await visitor_of_cookie(request, services)
    if visitor is None:
        raise NotLoggedIn
    return visitor


async def form_of(request: Request, services: Services) -> tuple[Visitor, dict[str, str]]:
    """Return the fields of a form from a visitor with a cookie. The last value of a name counts.

    Raises:
        NotLoggedIn: no session.
        READ_ONLY_KEY: the form changes something, and this visitor may only read.
        MISSING_FORM_TOKEN: the form does not contain the session's token.
        BodyTooLarge: more than FORM_BYTES.
    """
    visitor = await visitor_of_cookie(request, services)
    if visitor is None:
        raise NotLoggedIn
    fields = await read_form(request)
    token = request.headers.get(CSRF_HEADER) or fields.get(CSRF_FIELD, "")
    if not is_csrf_token(visitor.csrf, token):
        raise Refused(Reason.MISSING_FORM_TOKEN)
    return visitor, fields


def check_operator(visitor: Visitor) -> None:
    """Raise OPERATORS_ONLY for a tenant, as if this page did not exist."""
    if not visitor.is_operator:
        raise Refused(Reason.OPERATORS_ONLY)


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of an urlencoded form. Raises BodyTooLarge."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES:
            raise BodyTooLarge
    text = body.decode("utf-8", "replace")
    return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=200))
