"""Changes of checkpoints by the API: deletion, publication, expiry and copies.

Each change is one script, so that a checkpoint is in all lists or in none.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace

from cotrain_store import redis_keys
from cotrain_store.errors import CheckpointNotFound, SeqConflict
from cotrain_store.messages.ids import RunId, TenantId, decode, encode
from cotrain_store.messages.runs import CheckpointKind, CheckpointRecord, RunRecord
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script


class Checkpoints:
    """Changes to checkpoints. Each raises CheckpointNotFound: unknown, expired, or another tenant's."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._delete = async_script(connection, "checkpoint_delete")
        self._replace = async_script(connection, "checkpoint_replace")
        self._copy = async_script(connection, "checkpoint_copy")
        self._totals = async_script(connection, "checkpoint_totals")

    async def delete(self, tenant: TenantId, run: RunId, kind: CheckpointKind, name: str) -> None:
        """Delete the name of a checkpoint. Its weights are deleted once nothing else uses them."""
        args = {"tenant": tenant, "member": redis_keys.checkpoint_member(run, kind, name)}
        if await self._delete(args) == b"GONE":
            raise CheckpointNotFound

    async def publish(
        self, tenant: TenantId, run: RunId, kind: CheckpointKind, name: str, *, public: bool
    ) -> CheckpointRecord:
        """Make a checkpoint readable for every tenant, or private again. Idempotent."""
        key = redis_keys.checkpoint(run, kind, name)
        return await self._change(tenant, key, lambda record: replace(record, public=public))

    async def set_ttl(
        self, tenant: TenantId, run: RunId, kind: CheckpointKind, name: str, ttl_seconds: int | None
    ) -> CheckpointRecord:
        """Set a checkpoint to expire in `ttl_seconds` from now, or never."""
        key, expires_at = redis_keys.checkpoint(run, kind, name), _expiry(ttl_seconds)
        return await self._change(tenant, key, lambda record: replace(record, expires_at=expires_at))

    async def copy(
        self,
        source: CheckpointRecord,
        destination: RunRecord,
        ttl_seconds: int | None,
        *,
        reader: TenantId | None = None,
    ) -> CheckpointRecord:
        """Add a second name for the weights of a checkpoint, in the new run `destination`. Idempotent.

        The run is closed from the start. `source` must be readable for `reader` (its own or public), by
        default the tenant of `destination`.

        Raises:
            CheckpointNotFound: `source` was deleted.
            SeqConflict: the run exists, and is no copy of `source`.
        """
        copy = replace(
            source, run=destination.id, tenant=destination.tenant, created_at=time.time(),
            expires_at=_expiry(ttl_seconds), public=False,
        )  # fmt: skip
        args = {
            "source": redis_keys.checkpoint_member(source.run, source.kind, source.name), "checkpoint": encode(copy),
            "run": destination.id, "session": destination.session, "record": encode(destination),
            "reader": reader or destination.tenant, "created_at": destination.created_at,
        }  # fmt: skip
        answer = await self._copy(args)
        if answer == b"GONE":
            raise CheckpointNotFound
        made = None if answer == b"CONFLICT" else _record(answer)
        if made is None or made.weights != copy.weights or made.tenant != copy.tenant:
            raise SeqConflict(f"The training run {destination.id} exists already.")
        return made

    async def stored_bytes(self, tenant: TenantId) -> tuple[int, int]:
        """Return the number and bytes of a tenant's checkpoints. Unstored ones count, with 0 bytes."""
        count, size = await self._totals({"tenant": tenant})
        return count, size

    async def remove_expired(self, tenant: TenantId) -> None:
        """Remove expired checkpoints from a tenant's lists. Call it before reading them."""
        await self.stored_bytes(tenant)  # the script removes them before it counts

    async def _change(
        self, tenant: TenantId, key: str, change: Callable[[CheckpointRecord], CheckpointRecord]
    ) -> CheckpointRecord:
        while True:  # until no other process has changed the record in between
            before = await self._redis.get(key)
            record = _record(before) if before else None
            if record is None or record.tenant != tenant:
                raise CheckpointNotFound
            changed = change(record)
            args = {"before": before.decode(), "after": encode(changed)}
            if await self._replace(args) == b"OK":
                return changed


def _record(text: bytes) -> CheckpointRecord:
    return decode(CheckpointRecord, json.loads(text))


def _expiry(ttl_seconds: int | None) -> float | None:
    return None if ttl_seconds is None else time.time() + ttl_seconds


async def largest_checkpoint_bytes(connection: Connection, count: int) -> dict[TenantId, int]:
    """Return the checkpoint bytes of the `count` tenants with the most of them."""
    key = redis_keys.checkpoint_bytes()
    rows = await connection.zrange(key, 0, count - 1, desc=True, withscores=True)
    return {TenantId(name.decode()): int(size) for name, size in rows}
