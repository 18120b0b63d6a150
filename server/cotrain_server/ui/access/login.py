"""Login and logout with the admin key or a tenant's API key."""

import secrets

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from cotrain_server.errors import TooManyFailures, status_of
from cotrain_server.http.auth import note_failure
from cotrain_server.http.tenant_routes import ServicesDep
from cotrain_server.services import Services
from cotrain_server.ui.access import session as access
from cotrain_server.ui.rendering import guarded, html
from cotrain_store.errors import AuthenticationFailed, ExpiredKey, Reason, Refused

router = APIRouter(include_in_schema=False)

LOGIN = "/ui/login"
HOME = "/ui"
LOGIN_LIFE_S = 3600
WRONG = "This is neither the admin key nor a valid API key."
EXPIRED = "This API key has expired. The operator makes another with `cotrain keys create`."
STALE = "This form was open for too long. Try again."


@router.get(LOGIN)
@guarded
async def login_page(request: Request, services: ServicesDep, next: str = HOME) -> Response:
    """Show the form."""
    if await access.visitor_of_cookie(request, services):
        return RedirectResponse(_inside(next), 303)
    return _form(request, services, _inside(next))


@router.post(LOGIN)
@guarded
async def login(request: Request, services: ServicesDep) -> Response:
    """Check a key, and set a session cookie for it."""
    fields = await access.read_form(request)
    target = _inside(fields.get("next", HOME))
    nonce = request.cookies.get(access.LOGIN_COOKIE, "")
    if not access.is_csrf_token(nonce and services.signer.csrf(nonce), fields.get(access.CSRF_FIELD, "")):
        return _form(request, services, target, STALE, 403)
    try:
        session = await access.session_of_key(services, fields.get("key", "").strip())
    except AuthenticationFailed as wrong:
        return _refused(request, services, target, wrong)
    response = RedirectResponse(target, 303)
    access.keep_session(request, response, services, session)
    return response


@router.post("/ui/logout")
@guarded
async def logout(request: Request, services: ServicesDep) -> Response:
    """End the browser's session. Copies of its cookie become invalid, too."""
    if await access.visitor_of_cookie(request, services):
        await access.form_of(request, services)
        await access.end_session(request, services)
    elif request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refused(Reason.MISSING_FORM_TOKEN)
    response = RedirectResponse(LOGIN, 303)
    access.drop_session(response)
    return response


def _refused(request: Request, services: Services, target: str, wrong: AuthenticationFailed) -> Response:
    try:
        note_failure(request, services)
    except TooManyFailures as enough:
        return _form(request, services, target, str(enough), status_of(enough))
    return _form(request, services, target, EXPIRED if isinstance(wrong, ExpiredKey) else WRONG, 401)


def _form(request: Request, services: Services, target: str, error: str = "", status: int = 200) -> Response:
    nonce = secrets.token_hex(16)
    context = {"csrf": services.signer.csrf(nonce), "next": target, "error": error}
    response = html("login.html", context, status)
    access.set_cookie(request, response, services, access.LOGIN_COOKIE, nonce, LOGIN_LIFE_S)
    return response


def _inside(target: str) -> str:
    """Return a login's target, restricted to this server."""
    is_page = target == HOME or target.startswith((f"{HOME}/", f"{HOME}?"))
    return target if is_page and "\\" not in target and target.isprintable() else HOME
