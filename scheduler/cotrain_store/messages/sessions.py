"""Who asks: a tenant, and the sessions of its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from cotrain_store.messages.ids import SessionId, TenantId

FinishReason = Literal["success", "errored", "interrupted"]
Role = Literal["member", "viewer"]
"""What a key may do for its tenant: everything, or read."""


@dataclass(frozen=True)
class Tenant:
    """Who pays and is isolated: the owner of every record."""

    id: TenantId
    name: str
    """Of the key that was shown."""
    key_id: str = ""
    role: Role = "member"

    @property
    def may_change(self) -> bool:
        """Return whether the key may do more than read."""
        return self.role == "member"


@dataclass(frozen=True)
class SessionRecord:
    """One client process's connection."""

    id: SessionId
    tenant: TenantId
    created_at: float
    sdk_version: str = ""
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] = field(default_factory=dict)
    project_id: str | None = None
    display_name: str | None = None
    finished_at: float | None = None
    finish_reason: str = ""
