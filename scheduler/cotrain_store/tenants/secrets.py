"""The secrets that links and tokens are signed with: made once, the same for every API process."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from cotrain_store.keys import tenant_keys

if TYPE_CHECKING:
    from cotrain_store.redis_client.connection import Connection

_BYTES = 32


async def signing_keys(connection: Connection) -> tuple[bytes, bytes]:
    """Give the secret to sign with, and the one before it, whose signatures hold as well."""
    name = tenant_keys.signing_secret()
    for field in ("current", "previous"):
        await connection.hsetnx(name, field, secrets.token_bytes(_BYTES))
    current, previous = await connection.hmget(name, ["current", "previous"])
    return current, previous
