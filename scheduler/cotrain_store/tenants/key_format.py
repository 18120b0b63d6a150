"""What an API key looks like, what of it may be shown, and the keys that an operator chose. Knows no store.

One that we make is `tml-<id>_<secret>`, or `sk-…`: then the stock SDK wants to exchange it for a token.
One that an operator chose begins the same way and stands in the server's settings.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cotrain_store.errors import InvalidKey
from cotrain_store.messages.ids import TenantId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cotrain_store.messages.sessions import Role

KeyPrefix = Literal["tml", "sk"]

#: Behind `tml-`, of a key that an operator chose.
MIN_CHARACTERS = 16
#: Behind `tml-`, of the same: what lists show of it. The rest stays hard to guess.
SHOWN_CHARACTERS = 4

_FORM = re.compile(r"(?:tml|sk)-[A-Za-z0-9_.-]{1,322}")
_ISSUED_FORM = re.compile(r"(?:tml|sk)-([A-Za-z0-9]{1,64})_[A-Za-z0-9_-]{1,256}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True)
class KeyRecord:
    """An API key without its secret."""

    id: str
    tenant: TenantId
    name: str
    created_at: float
    not_after: float | None
    prefix: str
    """How it begins, for people who hold several."""
    role: Role = "member"
    in_settings: bool = False
    """Chosen by the operator: it stands in the server's settings, and is taken back there."""

    def has_expired(self, now_s: float) -> bool:
        """Tell whether it is good no more."""
        return self.not_after is not None and self.not_after < now_s


@dataclass(frozen=True)
class ChosenKey:
    """A key of the server's settings."""

    given_name: str
    api_key: str = field(repr=False)

    @property
    def name(self) -> str:
        """What it is called: without a name of its own, by how it begins."""
        return self.given_name or f"key {self.prefix.partition('-')[2]}…"

    @property
    def prefix(self) -> str:
        """What may be shown of it."""
        start, _, rest = self.api_key.partition("-")
        return f"{start}-{rest[:SHOWN_CHARACTERS]}"


def read_chosen_keys(entries: Iterable[str]) -> tuple[ChosenKey, ...]:
    """Read entries `KEY` or `NAME=KEY`; one without a name is called by how it begins.

    Raises:
        InvalidKey: one is not of this form, or too easy to guess; the message shows none of it but its name.
    """
    return tuple(_chosen_key(entry) for entry in entries)


def _chosen_key(entry: str) -> ChosenKey:
    name, _, api_key = entry.rpartition("=")
    if name and not _NAME.fullmatch(name):
        raise InvalidKey(
            "The name of an API key is at most 64 letters, digits, `_`, `.`, `@` or `-`."
        )
    which = f"API key {name!r}" if name else "An API key"
    if not _FORM.fullmatch(api_key):
        raise InvalidKey(
            f"{which} is not `tml-` or `sk-` and letters, digits, `_`, `.` or `-`, at most 322 of them."
        )
    if len(api_key.partition("-")[2]) < MIN_CHARACTERS:
        raise InvalidKey(
            f"{which} is too easy to guess: behind `tml-` or `sk-` it needs {MIN_CHARACTERS} characters "
            "or more. `cotrain keys create` makes good ones, and so does `openssl rand -hex 16`."
        )
    return ChosenKey(name, api_key)


def issued_key_id(api_key: str) -> str | None:
    """Take the public part of a key that we made; None if it cannot be one of those.

    Raises:
        InvalidKey: it is no key of any kind.
    """
    if not _FORM.fullmatch(api_key):
        raise InvalidKey
    match = _ISSUED_FORM.fullmatch(api_key)
    return match[1] if match else None


def new_api_key(prefix: KeyPrefix) -> str:
    """Make up a key: its public part, and a secret that is hard to guess."""
    return f"{prefix}-{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"


def new_tenant() -> TenantId:
    """Make up the id of a tenant."""
    return TenantId(f"t-{secrets.token_hex(8)}")


def digest_of_key(api_key: str) -> str:
    """Name a key by its hash: of 128 random bits or more, so a slow one would only make floods dear."""
    return hashlib.sha256(api_key.encode()).hexdigest()
