"""API keys and their tenants.

An issued key is `tml-<id>_<secret>`, or `sk-…`, which the stock SDK exchanges for a token. It is a row in Redis.
A chosen key begins the same way; the operator sets it in the server's settings. It is valid while it is in the
settings of the process that checks it. Redis stores its tenant, so that a key that is set again has the same
tenant. A process never accepts a chosen key because of its entry in Redis.

Only the SHA-256 of a key is stored.
"""

import hashlib
import hmac
import json
import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from cotrain_store import redis_keys
from cotrain_store.errors import ExpiredKey, InvalidKey, KeyInSettings
from cotrain_store.messages.ids import TenantId, decode, encode
from cotrain_store.messages.runs import Role, Tenant
from cotrain_store.redis_client.connection import CONNECTION_LOST, Connection
from cotrain_store.tenants.catalog import name_tenant

KeyPrefix = Literal["tml", "sk"]

#: Minimum number of characters after `tml-` in a chosen key.
MIN_CHARACTERS = 16
#: Number of characters after `tml-` of a chosen key that lists show. The rest stays hard to guess.
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
    prefix: str  # beginning of the key, for people who hold several
    role: Role = "member"
    in_settings: bool = False
    """True for a chosen key: it is in the server's settings, and can only be revoked there."""

    def has_expired(self, now_s: float) -> bool:
        """Return True if the key has expired."""
        return self.not_after is not None and self.not_after < now_s


@dataclass(frozen=True)
class ChosenKey:
    """Key of the server's settings."""

    given_name: str
    api_key: str = field(repr=False)

    @property
    def name(self) -> str:
        """Given name of the key, or a name made from its beginning."""
        return self.given_name or f"key {self.prefix.partition('-')[2]}…"

    @property
    def prefix(self) -> str:
        """Beginning of the key that may be shown."""
        start, _, rest = self.api_key.partition("-")
        return f"{start}-{rest[:SHOWN_CHARACTERS]}"


def read_chosen_keys(entries: Iterable[str]) -> tuple[ChosenKey, ...]:
    """Parse entries `KEY` or `NAME=KEY`. A key without a name is named after its beginning. Raises InvalidKey: an entry
    is malformed or too easy to guess. The message contains only its name.
    """
    return tuple(_chosen_key(entry) for entry in entries)


def _chosen_key(entry: str) -> ChosenKey:
    name, _, api_key = entry.rpartition("=")
    if name and not _NAME.fullmatch(name):
        raise InvalidKey("The name of an API key is at most 64 letters, digits, `_`, `.`, `@` or `-`.")
    which = f"API key {name!r}" if name else "An API key"
    if not _FORM.fullmatch(api_key):
        raise InvalidKey(f"{which} is not `tml-` or `sk-` and letters, digits, `_`, `.` or `-`, at most 322 of them.")
    if len(api_key.partition("-")[2]) < MIN_CHARACTERS:
        raise InvalidKey(
            f"{which} is too easy to guess: behind `tml-` or `sk-` it needs {MIN_CHARACTERS} characters "
            "or more. `cotrain keys create` makes good ones, and so does `openssl rand -hex 16`."
        )
    return ChosenKey(name, api_key)


def issued_key_id(api_key: str) -> str | None:
    """Return the public id of an issued key; None if the key cannot be an issued one. Raises InvalidKey: the key is malformed."""
    if not _FORM.fullmatch(api_key):
        raise InvalidKey
    match = _ISSUED_FORM.fullmatch(api_key)
    return match[1] if match else None


def new_api_key(prefix: KeyPrefix) -> str:
    """Return a new random key: a public id, and a secret that is hard to guess."""
    return f"{prefix}-{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"


def new_tenant() -> TenantId:
    """Return a new random tenant id."""
    return TenantId(f"t-{secrets.token_hex(8)}")


def digest_of_key(api_key: str) -> str:
    """Return the hash of a key. Keys have at least 128 random bits, so a slow hash would only make floods costly."""
    return hashlib.sha256(api_key.encode()).hexdigest()


#: Maximum time in s until a revoked key stops working.
CACHE_S = 5.0
#: Minimum interval in s between two writes of a key's last use by one process.
USE_RECORDED_S = 60.0
_CACHE_SIZE = 10_000
_SIGNING_KEY_BYTES = 32

_Cached = TypeVar("_Cached")
_NO_DIGEST = hashlib.sha256(b"").hexdigest()


class Tenants:
    """Authentication and administration of API keys."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._chosen: dict[str, KeyRecord] = {}  # by digest
        self._known: dict[str, tuple[float, KeyRecord]] = {}
        self._live: dict[str, tuple[float, KeyRecord | None]] = {}
        self._used_at: dict[str, float] = {}

    async def key(self, api_key: str) -> KeyRecord:
        """Return the record of a key. Raises InvalidKey or ExpiredKey."""
        key_id = issued_key_id(api_key)  # raises for a malformed key
        digest = digest_of_key(api_key)
        if digest in self._chosen:
            await self._record_use(self._chosen[digest])
            return self._chosen[digest]
        cached = self._known.get(digest)
        if cached and time.monotonic() - cached[0] < CACHE_S:
            if cached[1].has_expired(time.time()):
                raise ExpiredKey
            return cached[1]
        row = await self._row(key_id or "")
        # An unknown id gets the same comparison, so that the response time reveals nothing.
        if not key_id or not hmac.compare_digest(row.get("digest", _NO_DIGEST), digest):
            raise InvalidKey
        record = _record(key_id, row)
        if record.has_expired(time.time()):
            raise ExpiredKey
        _remember(self._known, digest, record)
        await self._record_use(record)
        return record

    async def live_key(self, key_id: str, cache_s: float | None = None) -> KeyRecord | None:
        """Return the record of a key id, or None if the key was revoked or has expired.

        The answer may be `cache_s` old; by default CACHE_S.
        """
        for chosen in self._chosen.values():
            if chosen.id == key_id:
                return chosen
        at, record = self._live.get(key_id, (-math.inf, None))
        if time.monotonic() - at >= (CACHE_S if cache_s is None else cache_s):
            record = await self.issued_key(key_id)
            _remember(self._live, key_id, record)
            if record and not record.has_expired(time.time()):
                await self._record_use(record)
        return None if record is None or record.has_expired(time.time()) else record

    async def issued_key(self, key_id: str) -> KeyRecord | None:
        """Return the record of an issued key id, even if expired; None if it was revoked."""
        row = await self._row(key_id)
        return _record(key_id, row) if row else None

    async def authenticate(self, api_key: str) -> Tenant:
        """Return the tenant of a key. Raises InvalidKey or ExpiredKey."""
        record = await self.key(api_key)
        return Tenant(record.tenant, record.name, record.id, record.role)

    async def issue(
        self,
        name: str,
        *,
        tenant: TenantId | None = None,
        not_after: float | None = None,
        prefix: KeyPrefix = "tml",
        role: Role = "member",
        api_key: str = "",
    ) -> str:
        """Create a key, or store the given one of `new_api_key`, and return it. Its secret is never returned again.

        Without `tenant`, the key creates a new tenant.
        """
        api_key = api_key or new_api_key(prefix)
        key_id = issued_key_id(api_key) or ""
        row: dict[str | bytes, str] = {
            "digest": digest_of_key(api_key),
            "tenant": tenant or new_tenant(),
            "name": name,
            "created_at": repr(time.time()),
            "not_after": "" if not_after is None else repr(not_after),
            "prefix": api_key.partition("_")[0],
            "role": role,
        }
        await name_tenant(self._redis, TenantId(row["tenant"]), name)  # before it has a key
        await self._redis.hset(redis_keys.api_key(key_id), mapping=row)
        await self._redis.sadd(redis_keys.api_keys(), key_id)
        return api_key

    async def set_chosen_keys(self, chosen: Sequence[ChosenKey]) -> list[KeyRecord]:
        """Replace the chosen keys of this process, and list the new ones for operators.

        Returns the previously listed keys that are not in the settings any longer.
        """
        before = await self._listed()
        self._chosen = {digest_of_key(key.api_key): await self._chosen_record(key) for key in chosen}
        listed = {record.id: encode(record) for record in self._chosen.values()}
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(redis_keys.settings_keys())
            if listed:
                names = {record.tenant: record.name for record in self._chosen.values()}
                pipeline.hset(redis_keys.settings_keys(), mapping=listed)
                pipeline.hset(redis_keys.tenant_names(), mapping=names)
            await pipeline.execute()
        return [record for record in before if record.id not in listed]

    async def revoke(self, key_id: str) -> bool:
        """Delete an issued key. Return False if it does not exist. All processes reject it within CACHE_S. Raises
        KeyInSettings: it is a chosen key, which can only be removed from the settings.
        """
        if any(record.id == key_id for record in await self._listed()):
            raise KeyInSettings
        if not await self._row(key_id):
            return False
        removed = await self._redis.delete(redis_keys.api_key(key_id))
        await self._redis.srem(redis_keys.api_keys(), key_id)
        await self._redis.hdel(redis_keys.key_uses(), key_id)
        self._known.clear()
        self._live.clear()
        return bool(removed)

    async def log_out(self, nonce: str, ends_at: float) -> None:
        """End a browser's session in every API process. `ends_at` is its expiry time in s since the epoch."""
        left_ms = max(1, math.ceil((ends_at - time.time()) * 1000))
        await self._redis.set(redis_keys.ended_session(nonce), "1", px=left_ms)

    async def has_logged_out(self, nonce: str) -> bool:
        """Return True if a logout ended a browser's session."""
        return bool(await self._redis.exists(redis_keys.ended_session(nonce)))

    async def list_keys(self) -> list[KeyRecord]:
        """Return all keys, oldest first: issued ones, and chosen ones of the API process that started last."""
        ids = await self._redis.smembers(redis_keys.api_keys())
        rows = [(key_id.decode(), await self._row(key_id.decode())) for key_id in ids]
        issued = [_record(key_id, row) for key_id, row in rows if row]
        return sorted([*issued, *await self._listed()], key=lambda record: record.created_at)

    async def last_uses(self) -> dict[str, float]:
        """Return the time of each key's last use in s since the epoch, accurate to USE_RECORDED_S."""
        found = await self._redis.hgetall(redis_keys.key_uses())
        return {key_id.decode(): float(at) for key_id, at in found.items()}

    async def _record_use(self, key: KeyRecord) -> None:
        now = time.time()
        if now - self._used_at.get(key.id, 0.0) < USE_RECORDED_S:
            return
        _trim(self._used_at)
        self._used_at[key.id] = now
        with suppress(*CONNECTION_LOST):  # a chosen key is valid without Redis
            await self._redis.hset(redis_keys.key_uses(), key.id, f"{now:.0f}")

    async def is_known(self, tenant: TenantId) -> bool:
        """Return True if a tenant ever had a key, or has a session."""
        is_named = await self._redis.hexists(redis_keys.tenant_names(), tenant)
        return bool(is_named or await self._redis.exists(redis_keys.tenant_sessions(tenant)))

    async def _listed(self) -> list[KeyRecord]:
        found = await self._redis.hvals(redis_keys.settings_keys())
        return [decode(KeyRecord, json.loads(record)) for record in found]

    async def _chosen_record(self, chosen: ChosenKey) -> KeyRecord:
        """Return the record of a chosen key. An unknown key permanently gets a new tenant."""
        digest = digest_of_key(chosen.api_key)
        fresh = KeyRecord(
            id=secrets.token_hex(8), tenant=new_tenant(), name="", created_at=time.time(), not_after=None, prefix=""
        )
        await self._redis.hsetnx(redis_keys.chosen_keys(), digest, encode(fresh))
        known = json.loads(await self._redis.hget(redis_keys.chosen_keys(), digest) or b"")
        row = {**known, "name": chosen.name, "prefix": chosen.prefix, "in_settings": True}
        return decode(KeyRecord, row)

    async def _row(self, key_id: str) -> dict[str, str]:
        """Return the row of an issued key; empty if it does not exist."""
        found = await self._redis.hgetall(redis_keys.api_key(key_id))
        return {field.decode(): value.decode() for field, value in found.items()}


async def signing_keys(connection: Connection) -> tuple[bytes, bytes]:
    """Return the secret that signs links and tokens in every API process, and the previous one. The previous
    one's signatures are still valid.
    """
    name = redis_keys.signing_secret()
    for half in ("current", "previous"):
        await connection.hsetnx(name, half, secrets.token_bytes(_SIGNING_KEY_BYTES))
    current, previous = await connection.hmget(name, ["current", "previous"])
    return current, previous


def _record(key_id: str, row: Mapping[str, str]) -> KeyRecord:
    return KeyRecord(
        key_id,
        TenantId(row["tenant"]),
        row["name"],
        float(row["created_at"]),
        float(row["not_after"]) if row["not_after"] else None,
        row["prefix"],
        "viewer" if row["role"] == "viewer" else "member",
    )


def _remember(cache: dict[str, tuple[float, _Cached]], name: str, value: _Cached) -> None:
    _trim(cache)
    cache[name] = (time.monotonic(), value)


def _trim(cache: dict[str, Any]) -> None:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
