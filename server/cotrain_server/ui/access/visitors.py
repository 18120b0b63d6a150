"""Which requests for pages are let in, and what becomes of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from cotrain_server.errors import BodyTooLarge, MissingFormToken, NotLoggedIn, OperatorsOnly
from cotrain_server.http.auth import authenticate, is_operator, shown_key
from cotrain_server.ui.access.session import (
    CSRF_FIELD,
    CSRF_HEADER,
    Visitor,
    is_csrf_token,
    visitor_of_cookie,
)

if TYPE_CHECKING:
    from fastapi import Request

    from cotrain_server.services import Services

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
