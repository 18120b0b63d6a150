"""Access to pages: login and logout, and the session cookie.

A signed cookie replaces the key after a login, and contains no key. A logout ends the session. A tenant's session ends
with its key, and has the key's current role. The operator's session ends if the admin key changes.
"""

import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from cotrain_server.errors import BodyTooLarge, NotLoggedIn, TooManyFailures, status_of
from cotrain_server.http.auth import authenticate, check_role, count_wrong_key, is_operator, shown_key
from cotrain_server.http.tenant_routes import ServicesDep
from cotrain_server.services import Services
from cotrain_server.signed_tokens import UiSession
from cotrain_server.ui.rendering import HOME, html, page_router
from cotrain_store.errors import AuthenticationFailed, ExpiredKey, Reason, Refused
from cotrain_store.messages.runs import Tenant

LOGIN = "/ui/login"
COOKIE = "cotrain_session"
LIFE_S = 12 * 3600
#: Maximum size of a form, including a playground prompt.
FORM_BYTES = 256 * 1024
WRONG = "This is neither the admin key nor a valid API key."
EXPIRED = "This API key has expired. Ask the operator for another."


@dataclass(frozen=True)
class Visitor:
    """Visitor of a page: the operator, or a tenant, who sees only its own part."""

    tenant: Tenant | None  # None for the operator

    @property
    def is_operator(self) -> bool:
        """True if the visitor is the operator, who sees everything."""
        return self.tenant is None

    @property
    def name(self) -> str:
        """Display name for the page's corner."""
        return self.tenant.name if self.tenant else "Operator"


async def visitor_of(request: Request, services: Services) -> Visitor:
    """Return the visitor of a page or its JSON twin, by its cookie or by a key as in the API.

    Raises:
        NotLoggedIn: neither was sent.
        InvalidKey, ExpiredKey, InvalidToken, TooManyFailures: as in the API.
    """
    if not shown_key(request):
        return await _logged_in(request, services)
    if is_operator(request, services):
        return Visitor(None)
    return Visitor(await authenticate(request, services))


async def form_of(request: Request, services: Services) -> tuple[Visitor, dict[str, str]]:
    """Return the fields of a form from a visitor with a cookie. The last value of a name counts.

    Raises:
        NotLoggedIn: no session.
        READ_ONLY_KEY: the form changes something, and this visitor may only read.
        BodyTooLarge: more than FORM_BYTES.
    """
    return await _logged_in(request, services), await _read_form(request)


def check_operator(visitor: Visitor) -> None:
    """Raise OPERATORS_ONLY for a tenant, as if this page did not exist."""
    if not visitor.is_operator:
        raise Refused(Reason.OPERATORS_ONLY)


router = page_router()


@router.get(LOGIN)
async def login_page(request: Request, services: ServicesDep, next: str = HOME) -> Response:
    """Show the form."""
    if await _visitor_of_cookie(request, services):
        return RedirectResponse(_inside(next), 303)
    return _form(_inside(next))


@router.post(LOGIN)
async def login(request: Request, services: ServicesDep) -> Response:
    """Check a key, and set a session cookie for it."""
    fields = await _read_form(request)
    target = _inside(fields.get("next", HOME))
    try:
        session = await _session_of_key(services, fields.get("key", "").strip())
    except AuthenticationFailed as wrong:
        return _refused(request, services, target, wrong)
    response, public = RedirectResponse(target, 303), services.settings.public_url or ""
    response.set_cookie(
        COOKIE,
        services.signer.sign_session(session),
        max_age=LIFE_S,
        path=HOME,
        httponly=True,  # scripts cannot read it
        samesite="strict",  # other sites cannot send it
        secure=request.url.scheme == "https" or public.startswith("https:"),
    )
    return response


@router.post("/ui/logout")
async def logout(request: Request, services: ServicesDep) -> Response:
    """End the browser's session in all API processes. Copies of its cookie become invalid, too."""
    if session := _session_of(request, services):
        await services.tenants.log_out(session.nonce, session.ends_at)
    response = RedirectResponse(LOGIN, 303)
    response.delete_cookie(COOKIE, path=HOME)
    return response


def _form(target: str, error: str = "", status: int = 200) -> Response:
    return html("login.html", {"next": target, "error": error}, status)


def _refused(request: Request, services: Services, target: str, wrong: AuthenticationFailed) -> Response:
    try:
        count_wrong_key(request, services)
    except TooManyFailures as enough:
        return _form(target, str(enough), status_of(enough))
    return _form(target, EXPIRED if isinstance(wrong, ExpiredKey) else WRONG, 401)


def _inside(target: str) -> str:
    """Return a login's target, restricted to this server."""
    is_page = target == HOME or target.startswith((f"{HOME}/", f"{HOME}?"))
    return target if is_page and "\\" not in target and target.isprintable() else HOME


async def _session_of_key(services: Services, key: str) -> UiSession:
    """Open a session for the admin key or a tenant's; raises InvalidKey or ExpiredKey."""
    nonce, ends_at = secrets.token_hex(16), int(time.time()) + LIFE_S
    if hmac.compare_digest(key.encode(), services.admin_key.encode()):
        return UiSession(nonce, ends_at, "", _fingerprint(services.admin_key), "")
    record = await services.tenants.key(key)
    return UiSession(nonce, ends_at, record.tenant, record.id, record.name)


async def _logged_in(request: Request, services: Services) -> Visitor:
    visitor = await _visitor_of_cookie(request, services)
    if visitor is None:
        raise NotLoggedIn
    return visitor


async def _visitor_of_cookie(request: Request, services: Services) -> Visitor | None:
    """Return the logged-in visitor of a browser, or None without a valid session. Raises READ_ONLY_KEY: the session is
    a viewer's, and the request changes something.
    """
    session = _session_of(request, services)
    if session is None or await services.tenants.has_logged_out(session.nonce):
        return None
    if not session.tenant:
        is_same = hmac.compare_digest(session.key_id, _fingerprint(services.admin_key))
        return Visitor(None) if is_same else None
    key = await services.tenants.live_key(session.key_id, cache_s=0.0)
    if key is None:
        return None
    tenant = Tenant(key.tenant, session.name, key.id, key.role)
    check_role(request, tenant)
    return Visitor(tenant)


def _session_of(request: Request, services: Services) -> UiSession | None:
    return services.signer.read_session(request.cookies.get(COOKIE, ""), time.time())


def _fingerprint(admin_key: str) -> str:
    return hashlib.sha256(b"cotrain ui " + admin_key.encode()).hexdigest()


async def _read_form(request: Request) -> dict[str, str]:
    """Return the fields of an urlencoded form. Raises BodyTooLarge."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES:
            raise BodyTooLarge
    text = body.decode("utf-8", "replace")
    return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=200))
