"""Who is who: API keys and the tenants they belong to.

A key is `tml-<id>_<secret>`, or `sk-…`: then the stock SDK wants to exchange it for a token. Only the
SHA-256 of the secret is kept: the secret is 256 random bits, so a slow hash would only make a flood
of wrong keys dear.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from cotrain_store.errors import ExpiredKey, InvalidKey
from cotrain_store.keys import tenant_keys
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.sessions import Tenant
from cotrain_store.tenant_names import name_tenant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.connection import Connection

#: A revoked key stops working within this time.
CACHE_S = 5.0
_CACHE_SIZE = 10_000

KeyPrefix = Literal["tml", "sk"]

_FORM = re.compile(r"(?:tml|sk)-([A-Za-z0-9]{1,64})_([A-Za-z0-9_-]{1,256})")
_SHORT_FORM = re.compile(r"(?:tml|sk)-[A-Za-z0-9_.-]{1,256}")
_Cached = TypeVar("_Cached")
_NO_DIGEST = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class KeyRecord:
    """An API key without its secret."""

    id: str
    tenant: TenantId
    name: str
    created_at: float
    not_after: float | None

    def has_expired(self, now_s: float) -> bool:
        """Tell whether it is good no more."""
        return self.not_after is not None and self.not_after < now_s


class Tenants:
    """Authenticate and administer API keys."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._known: dict[str, tuple[float, KeyRecord]] = {}
        self._live: dict[str, tuple[float, bool]] = {}

    async def key(self, api_key: str) -> KeyRecord:
        """Find a key by what its owner shows; raises InvalidKey or ExpiredKey."""
        key_id, digest = _key_id(api_key), _digest(api_key)  # in this order: it must be of our form
        cached = self._known.get(digest)
        if cached and time.monotonic() - cached[0] < CACHE_S:
            return cached[1]
        row = await self._row(key_id)
        # The same comparison for an unknown id, so that time tells nothing.
        if not hmac.compare_digest(row.get("digest", _NO_DIGEST), digest):
            raise InvalidKey
        record = _record(key_id, row)
        if record.has_expired(time.time()):
            raise ExpiredKey
        _remember(self._known, digest, record)
        return record

    async def is_live(self, key_id: str) -> bool:
        """Tell whether a key exists and has not expired; the answer may be CACHE_S old."""
        cached = self._live.get(key_id)
        if cached and time.monotonic() - cached[0] < CACHE_S:
            return cached[1]
        row = await self._row(key_id)
        is_live = bool(row) and not _record(key_id, row).has_expired(time.time())
        _remember(self._live, key_id, is_live)
        return is_live

    async def authenticate(self, api_key: str) -> Tenant:
        """Find the tenant of a key; raises InvalidKey or ExpiredKey."""
        record = await self.key(api_key)
        return Tenant(record.tenant, record.name)

    async def issue(
        self,
        name: str,
        *,
        tenant: TenantId | None = None,
        not_after: float | None = None,
        prefix: KeyPrefix = "tml",
    ) -> str:
        """Make a key and return it: the only time anybody sees its secret.

        Without `tenant` the key starts a new one; with it, it is one more key of that tenant.
        """
        api_key = f"{prefix}-{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"
        await self._store(api_key, name, tenant or TenantId(f"t-{secrets.token_hex(8)}"), not_after)
        return api_key

    async def register(self, api_key: str, name: str) -> Tenant:
        """Accept a key the operator chose. Twice is harmless: the tenant is derived from the key.

        Raises:
            InvalidKey: not of the form `tml-…` or `sk-…`, or its id belongs to another secret.
        """
        row = await self._row(_key_id(api_key))
        if row:
            if not hmac.compare_digest(row["digest"], _digest(api_key)):
                raise InvalidKey("An API key with this id and another secret exists.")
            return Tenant(TenantId(row["tenant"]), row["name"])
        tenant = TenantId(f"t-{_digest(api_key)[:16]}")
        await self._store(api_key, name, tenant, None)
        return Tenant(tenant, name)

    async def revoke(self, key_id: str) -> bool:
        """Remove a key; False if there was none. Takes effect within CACHE_S everywhere."""
        removed = await self._redis.delete(tenant_keys.api_key(key_id))
        await self._redis.srem(tenant_keys.api_keys(), key_id)
        self._known.clear()
        self._live.clear()
        return bool(removed)

    async def list_keys(self) -> list[KeyRecord]:
        """List all keys, oldest first."""
        ids = await self._redis.smembers(tenant_keys.api_keys())
        records = [await self._record(key_id.decode()) for key_id in ids]
        return sorted((r for r in records if r), key=lambda record: record.created_at)

    async def is_known(self, tenant: TenantId) -> bool:
        """Tell whether a tenant was ever given a key."""
        return bool(await self._redis.hexists(tenant_keys.tenant_names(), tenant))

    async def name_all(self) -> None:
        """Name the tenants whose keys were made before tenants had names."""
        for key in await self.list_keys():
            await name_tenant(self._redis, key.tenant, key.name)

    async def _record(self, key_id: str) -> KeyRecord | None:
        row = await self._row(key_id)
        return _record(key_id, row) if row else None

    async def _row(self, key_id: str) -> dict[str, str]:
        row = await self._redis.hgetall(tenant_keys.api_key(key_id))
        return {field.decode(): value.decode() for field, value in row.items()}

    async def _store(
        self, api_key: str, name: str, tenant: TenantId, not_after: float | None
    ) -> None:
        key_id = _key_id(api_key)
        row: dict[str | bytes, str] = {
            "digest": _digest(api_key),
            "tenant": tenant,
            "name": name,
            "created_at": repr(time.time()),
            "not_after": "" if not_after is None else repr(not_after),
        }
        await self._redis.hset(tenant_keys.api_key(key_id), mapping=row)
        await self._redis.sadd(tenant_keys.api_keys(), key_id)
        await name_tenant(self._redis, tenant, name)


def _record(key_id: str, row: Mapping[str, str]) -> KeyRecord:
    not_after = float(row["not_after"]) if row["not_after"] else None
    created_at = float(row["created_at"])
    return KeyRecord(key_id, TenantId(row["tenant"]), row["name"], created_at, not_after)


def _remember(cache: dict[str, tuple[float, _Cached]], name: str, value: _Cached) -> None:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[name] = (time.monotonic(), value)


def _key_id(api_key: str) -> str:
    """Take the public part of a key; a key without one (`tml-dev`) is known by its digest."""
    match = _FORM.fullmatch(api_key)
    if match:
        return match[1]
    if not _SHORT_FORM.fullmatch(api_key):
        raise InvalidKey
    return f"d{_digest(api_key)[:32]}"


def _digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()
