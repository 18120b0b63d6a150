"""Delete, publish, keep and copy checkpoints: the API's side of them. A worker makes them.

Each change is one script: a checkpoint is in all lists or in none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.connection import Connection
    from cotrain_store.messages import CheckpointKind, CheckpointRecord, RunId, RunRecord, TenantId


class Checkpoints:
    """Change checkpoints, for their owners only: anybody else's are not found."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def delete(self, tenant: TenantId, run: RunId, kind: CheckpointKind, name: str) -> None:
        """Take a name away; its weights go when nothing else uses them.

        Raises:
            CheckpointNotFound: unknown, expired, or another tenant's.
        """
        raise NotImplementedError

    async def publish(
        self, tenant: TenantId, run: RunId, kind: CheckpointKind, name: str, *, public: bool
    ) -> CheckpointRecord:
        """Let every tenant read a checkpoint, or only its owner again. Twice is harmless.

        Raises:
            CheckpointNotFound: unknown, expired, or another tenant's.
        """
        raise NotImplementedError

    async def set_ttl(
        self,
        tenant: TenantId,
        run: RunId,
        kind: CheckpointKind,
        name: str,
        ttl_seconds: int | None,
    ) -> CheckpointRecord:
        """Let a checkpoint expire so many seconds from now, or never.

        Raises:
            CheckpointNotFound: unknown, expired, or another tenant's.
        """
        raise NotImplementedError

    async def copy(
        self, source: CheckpointRecord, destination: RunRecord, ttl_seconds: int | None
    ) -> CheckpointRecord:
        """Give the weights of a checkpoint a second name, in a new run that is closed.

        `source` was found for the tenant of `destination`: it is that tenant's, or public. Twice is
        harmless.

        Raises:
            CheckpointNotFound: `source` is gone meanwhile.
            SeqConflict: the run exists and is not this copy.
        """
        raise NotImplementedError

    async def stored_bytes(self, tenant: TenantId) -> tuple[int, int]:
        """Count a tenant's checkpoints, and their bytes; one not stored yet counts, without bytes."""
        raise NotImplementedError

    async def strike_expired(self, tenant: TenantId) -> None:
        """Take what has expired off a tenant's lists; call it before reading them."""
        raise NotImplementedError
