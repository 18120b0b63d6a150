"""Signed download links, tokens of API keys, and browser sessions.

All keys are derived from two secrets shared by all API processes, the current and the previous one.
Signatures of both are accepted. A link is not an API key: it grants one file of one checkpoint for
some minutes. The checkpoint is looked up again for the link's tenant.
"""

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jwt

from cotrain_server.errors import InvalidToken
from cotrain_store.errors import Reason, Refused
from cotrain_store.messages.ids import TenantId, WeightsRef

LINK_LIFE_S = 15 * 60
#: An upload may be sent for half an hour, and has two files.
UPLOAD_LIFE_S = 3600
#: SDKs request the next token after half of this time.
TOKEN_LIFE_S = 3600
_ALGORITHM = "HS256"
#: An SDK identifies its user (`auth whoami`) from its token if the issuer starts with this prefix.
_ISSUER = "passport-cotrain"
_CLAIMS = ["sub", "jti", "name", "iat", "exp"]


@dataclass(frozen=True)
class Link:
    """Permission to download one file until a given time, for any client that has the link."""

    tenant: TenantId  # Tenant of the link. Its read access to the checkpoint is checked again.
    path: str
    weights: WeightsRef
    """Weights that the path named at signing. The link never yields other weights."""
    file: str
    expires_at: int


@dataclass(frozen=True)
class StartedUpload:
    """An upload of an adapter's files that a tenant started."""

    tenant: TenantId
    session: str  # Id of the session that its import opens
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    project: str | None
    expires_at: int


@dataclass(frozen=True)
class Token:
    """A token that represents an API key for one hour."""

    tenant: TenantId
    key_id: str
    name: str  # name of the key


@dataclass(frozen=True)
class UiSession:
    """Content of a browser's session cookie, which replaces the key after a login."""

    nonce: str  # random value that identifies the session in a logout
    ends_at: int
    tenant: str  # empty for the operator
    key_id: str  # id of the tenant's key, or a digest of the admin key
    name: str  # name of the tenant's key


class Signer:
    """Signing and verification of links, tokens and sessions."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """Derive the keys from the secrets, the current one first."""
        self._link_keys = [_derive(secret, b"link") for secret in secrets]
        self._upload_keys = [_derive(secret, b"upload") for secret in secrets]
        self._token_keys = [_derive(secret, b"token") for secret in secrets]
        self._session_keys = [_derive(secret, b"ui session") for secret in secrets]

    def sign_link(self, link: Link) -> str:
        """Return a signed link as a URL path component."""
        return _sign(self._link_keys, astuple(link))

    def read_link(self, text: str, now: float) -> Link:
        """Return the link that `sign_link` wrote. Raises BAD_LINK if it is invalid or expired."""
        fields = _read(self._link_keys, text)
        if fields is None or (link := Link(*fields)).expires_at <= now:
            raise Refused(Reason.BAD_LINK)
        return link

    def sign_upload(self, upload: StartedUpload) -> str:
        """Return the id of an upload."""
        return _sign(self._upload_keys, astuple(upload))

    def read_upload(self, text: str, tenant: TenantId) -> StartedUpload:
        """Return the upload that `sign_upload` wrote, which may have expired.

        Raises UPLOAD_NOT_FOUND if the id is invalid or another tenant's.
        """
        fields = _read(self._upload_keys, text)
        if fields is None or (upload := StartedUpload(*fields)).tenant != tenant:
            raise Refused(Reason.UPLOAD_NOT_FOUND)
        return upload

    def make_token(self, token: Token, now: float) -> str:
        """Return a token, valid for one hour, or until its key ends."""
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
        """Return the token that `make_token` wrote. Raises InvalidToken: invalid, or expired (then `expired` is true,
        and the signature was valid).
        """
        claims = self._claims(text)
        return Token(TenantId(claims["sub"]), claims["jti"], claims["name"])

    def sign_session(self, session: UiSession) -> str:
        """Return a session as a cookie value."""
        return _sign(self._session_keys, astuple(session))

    def read_session(self, text: str, now: float) -> UiSession | None:
        """Return the session that `sign_session` wrote, or None if it is invalid or expired."""
        fields = _read(self._session_keys, text)
        return None if fields is None or (session := UiSession(*fields)).ends_at <= now else session

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
    """Return a key for one purpose, so that a signature for one purpose is invalid for another."""
    return hmac.digest(secret, b"cotrain " + purpose, "sha256")


def _sign(keys: Sequence[bytes], fields: Sequence[Any]) -> str:
    """Return the fields as text, with a signature of the first key."""
    content = _to_text(json.dumps(fields, separators=(",", ":")).encode())
    return f"{content}.{_seal(keys[0], content)}"


def _read(keys: Sequence[bytes], text: str) -> list[Any] | None:
    """Return the fields that `_sign` wrote with one of the keys, or None."""
    content, _, seal = text.partition(".")
    if not text.isascii() or not any(hmac.compare_digest(_seal(key, content), seal) for key in keys):
        return None
    fields: list[Any] = json.loads(_from_text(content))
    return fields


def _seal(key: bytes, content: str) -> str:
    return _to_text(hmac.digest(key, content.encode(), "sha256"))


def _to_text(content: bytes) -> str:
    return urlsafe_b64encode(content).decode().rstrip("=")


def _from_text(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
