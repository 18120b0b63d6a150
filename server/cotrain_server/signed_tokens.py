"""Sign what this server will have to believe later: download links, and what stands for keys: tokens
and browsers' sessions.

Everything is derived from two secrets that all API processes share: what the current one signed and
what the previous one signed is believed. A link is no API key: it opens one file of one checkpoint
for some minutes, and the checkpoint is looked up again for the tenant that the link was made for.
"""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jwt

from cotrain_server.errors import BadLink, InvalidToken
from cotrain_store.messages.ids import TenantId, WeightsRef

LINK_LIFE_S = 15 * 60
#: SDKs ask for the next token at half of this.
TOKEN_LIFE_S = 3600
_ALGORITHM = "HS256"
#: An SDK tells who it is (`auth whoami`) by a token that it was given, if its issuer begins so.
_ISSUER = "passport-cotrain"
_CLAIMS = ["sub", "jti", "name", "iat", "exp"]


@dataclass(frozen=True)
class Link:
    """Leave to fetch one file until some time, for any client that has the link."""

    tenant: TenantId
    """For whom it was made; whether that tenant may still read the checkpoint is asked again."""
    path: str
    weights: WeightsRef
    """What the path named then: a link never gives what it names later."""
    file: str
    expires_at: int


@dataclass(frozen=True)
class Token:
    """A token that stands for an API key for an hour."""

    tenant: TenantId
    key_id: str
    name: str
    """Of the key."""


@dataclass(frozen=True)
class UiSession:
    """What a browser shows after a login, in place of the key."""

    nonce: str
    """Random; its forms' token is made of it."""
    ends_at: int
    tenant: str
    """Empty: the operator's."""
    key_id: str
    """Of the tenant's key, or a digest of the admin key."""
    name: str
    """Of the tenant's key."""


class Signer:
    """Signs and reads links, tokens and sessions."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """Take the secrets, the current one first."""
        self._link_keys = [_derive(secret, b"link") for secret in secrets]
        self._token_keys = [_derive(secret, b"token") for secret in secrets]
        self._session_keys = [_derive(secret, b"ui session") for secret in secrets]
        self._form_key = _derive(secrets[0], b"ui form")

    def sign_link(self, link: Link) -> str:
        """Write a link as the part of a URL that makes it one."""
        content = _to_text(json.dumps(astuple(link), separators=(",", ":")).encode())
        return f"{content}.{_seal(self._link_keys[0], content)}"

    def read_link(self, text: str, now: float) -> Link:
        """Read what `sign_link` wrote. Raises BadLink for anything else, and for one that expired."""
        content, _, seal = text.partition(".")
        if not text.isascii() or not _is_sealed(self._link_keys, content, seal):
            raise BadLink
        tenant, path, weights, file, expires_at = json.loads(_from_text(content))
        if expires_at <= now:
            raise BadLink
        return Link(TenantId(tenant), path, WeightsRef(weights), file, expires_at)

    def make_token(self, token: Token, now: float) -> str:
        """Write a token, valid for an hour, or for as long as its key is."""
        claims = {
            "iss": _ISSUER,
            "sub": token.tenant,
            "org_id": token.tenant,
            "jti": token.key_id,
            "name": token.name,
            "iat": int(now),
            "exp": int(now) + TOKEN_LIFE_S,
        }
        return jwt.encode(claims, self._token_keys[0], algorithm=_ALGORITHM)

    def read_token(self, text: str) -> Token:
        """Read what `make_token` wrote.

        Raises:
            InvalidToken: expired (`expired` is true, and it was ours), or not ours.
        """
        claims = self._claims(text)
        return Token(TenantId(claims["sub"]), claims["jti"], claims["name"])

    def sign_session(self, session: UiSession) -> str:
        """Write a session as the value of a cookie."""
        content = _to_text(json.dumps(astuple(session), separators=(",", ":")).encode())
        return f"{content}.{_seal(self._session_keys[0], content)}"

    def read_session(self, text: str, now: float) -> UiSession | None:
        """Read what `sign_session` wrote; None for anything else, and for one that has ended."""
        content, _, seal = text.partition(".")
        if not text.isascii() or not _is_sealed(self._session_keys, content, seal):
            return None
        session = UiSession(*json.loads(_from_text(content)))
        return session if session.ends_at > now else None

    def csrf(self, nonce: str) -> str:
        """Make the token that the forms of a session, or of the login, carry."""
        return _seal(self._form_key, nonce)

    def _claims(self, text: str) -> dict[str, Any]:
        for key in self._token_keys:
            try:
                return jwt.decode(text, key, algorithms=[_ALGORITHM], options={"require": _CLAIMS})
            except jwt.InvalidSignatureError:
                continue
            except jwt.ExpiredSignatureError as expired:
                raise InvalidToken(expired=True) from expired
            except jwt.InvalidTokenError as wrong:
                raise InvalidToken from wrong
        raise InvalidToken


def _derive(secret: bytes, purpose: bytes) -> bytes:
    """Make a key for one purpose, so that nothing signed for the one passes for the other."""
    return hmac.digest(secret, b"cotrain " + purpose, "sha256")


def _seal(key: bytes, content: str) -> str:
    return _to_text(hmac.digest(key, content.encode(), "sha256"))


def _is_sealed(keys: Sequence[bytes], content: str, seal: str) -> bool:
    return any(hmac.compare_digest(_seal(key, content), seal) for key in keys)


def _to_text(content: bytes) -> str:
    return urlsafe_b64encode(content).decode().rstrip("=")


def _from_text(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
