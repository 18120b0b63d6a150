"""What a browser keeps after a login: a signed cookie that stands for the key which was shown.

It holds no key. A logout ends it. A tenant's ends with its key, and has the role that the key has now.
The operator's ends with a change of the admin key.

Which requests for pages are let in, and what becomes of the others.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fastapi import Request, Response

from cotrain_server.errors import BodyTooLarge, MissingFormToken, NotLoggedIn, OperatorsOnly
from cotrain_server.http.auth import authenticate, check_role, is_operator, shown_key
from cotrain_server.services import Services
from cotrain_server.signed_tokens import UiSession
from cotrain_store.messages.runs import Tenant

COOKIE = "cotrain_session"
#: Known before the login, so that no other site can log a browser in.
LOGIN_COOKIE = "cotrain_login"
#: What a form and htmx send the token as.
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"
PATH = "/ui"
LIFE_S = 12 * 3600


@dataclass(frozen=True)
class Visitor:
    """Who looks at a page: the operator, or a tenant, which sees its own part."""

    tenant: Tenant | None
    """None: the operator."""
    csrf: str
    """What its forms must carry; empty where an API key was shown instead of a cookie."""

    @property
    def is_operator(self) -> bool:
        """Tell whether everything is shown."""
        return self.tenant is None

    @property
    def name(self) -> str:
        """Say who it is, for the page's corner."""
        return self.tenant.name if self.tenant else "Operator"


async def session_of_key(services: Services, key: str) -> UiSession:
    """Open a session for the admin key or a tenant's; raises InvalidKey or ExpiredKey."""
    nonce, ends_at = secrets.token_hex(16), int(time.time()) + LIFE_S
    if hmac.compare_digest(key.encode(), services.admin_key.encode()):
        return UiSession(nonce, ends_at, "", _fingerprint(services.admin_key), "")
    record = await services.tenants.key(key)
    return UiSession(nonce, ends_at, record.tenant, record.id, record.name)


async def visitor_of_cookie(request: Request, services: Services) -> Visitor | None:
    """Return the visitor that a browser logged in as; None without a session that is still valid.

    Raises:
        ReadOnlyKey: the session is a viewer's, and the request changes something.
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


def keep_session(
    request: Request, response: Response, services: Services, session: UiSession
) -> None:
    """Give a browser its session."""
    value = services.signer.sign_session(session)
    set_cookie(request, response, services, COOKIE, value, LIFE_S)
    response.delete_cookie(LOGIN_COOKIE, path=PATH)


def set_cookie(
    request: Request, response: Response, services: Services, name: str, value: str, life_s: int
) -> None:
    """Set a cookie that scripts cannot read, that no other site's request carries, and that only HTTPS
    carries where the server is reached by it.
    """
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
    """Take a browser's session away."""
    response.delete_cookie(COOKIE, path=PATH)


def is_csrf_token(expected: str, shown: str) -> bool:
    """Tell whether a request carries its session's token."""
    return bool(expected) and hmac.compare_digest(expected.encode(), shown.encode())


def _session_of(request: Request, services: Services) -> UiSession | None:
    return services.signer.read_session(request.cookies.get(COOKIE, ""), time.time())


def _fingerprint(admin_key: str) -> str:
    return hashlib.sha256(b"cotrain ui " + admin_key.encode()).hexdigest()


#: The fields of a form, a prompt for the playground among them.
FORM_BYTES = 256 * 1024


async def visitor_of(request: Request, services: Services) -> Visitor:
    """Find who asks for a page or its JSON twin: by its cookie, or by a key as the API takes it.

    Raises:
        NotLoggedIn: neither was shown.
        InvalidKey, ExpiredKey, InvalidToken, TooManyFailures: as the API does.
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
    """Read a form of a visitor with a cookie; the fields, the last of each name.

    Raises:
        NotLoggedIn: no session.
        ReadOnlyKey: the form changes something, and this visitor may only read.
        MissingFormToken: the form does not carry the session's token.
        BodyTooLarge: more than FORM_BYTES.
    """
    visitor = await visitor_of_cookie(request, services)
    if visitor is None:
        raise NotLoggedIn
    fields = await read_form(request)
    if not is_csrf_token(visitor.csrf, _shown_token(request, fields)):
        raise MissingFormToken
    return visitor, fields


def check_operator(visitor: Visitor) -> None:
    """Answer a tenant as if this page did not exist; raises OperatorsOnly."""
    if not visitor.is_operator:
        raise OperatorsOnly


async def read_form(request: Request) -> dict[str, str]:
    """Read the fields of an urlencoded form; raises BodyTooLarge."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES:
            raise BodyTooLarge
    text = body.decode("utf-8", "replace")
    return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=200))


def _shown_token(request: Request, fields: dict[str, str]) -> str:
    return request.headers.get(CSRF_HEADER) or fields.get(CSRF_FIELD, "")
