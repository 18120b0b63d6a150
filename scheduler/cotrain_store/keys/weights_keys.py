"""The keys of weights, and of the checkpoints that name them."""

from __future__ import annotations

from cotrain_store.keys.fleet_keys import prefix
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WeightsRef, WorkerId


def weights(ref: WeightsRef) -> str:
    """Name the hash of weights (record, digest, size, optimizer); a worker forgets unused ones.

    `history`: where the run's own stood then. While a named save is not stored: also its checkpoint, result and whatever else becomes of it then.
    """
    return f"cotrain:weights:{ref}"


def weights_users(ref: WeightsRef) -> str:
    """Name the set of who refers to weights; goes with the weights.

    `s:` a sampler, `c:` a checkpoint, `l:{pool}:<run>:<seq>` a load that the run's log holds.
    """
    return f"cotrain:weights:{ref}:users"


def pool_weights(pool: PoolId) -> str:
    """Name the set of all weights of a pool."""
    return f"{prefix(pool)}weights"


def released_weights(pool: PoolId) -> str:
    """Name the sorted set of weights that something has ceased to refer to (score: when to look at them next)."""
    return f"{prefix(pool)}released"


def content(pool: PoolId, digest: str) -> str:
    """Name the set of weights with one and the same content, hence one folder."""
    return f"{prefix(pool)}content:{digest}"


def optimizer_content(pool: PoolId, digest: str) -> str:
    """Name the set of weights with one and the same optimizer state, hence one file."""
    return f"{prefix(pool)}optimizer:{digest}"


def external_folders(pool: PoolId) -> str:
    """Name the set of folders of encrypted files, as `external_folder` names them."""
    return f"{prefix(pool)}external"


def unstored_weights(pool: PoolId, worker_id: WorkerId) -> str:
    """Name the set of weights that only one worker has, until it has stored them."""
    return f"{prefix(pool)}unstored:{worker_id}"


def checkpoint(run_id: RunId, kind: str, name: str) -> str:
    """Name a checkpoint's record; expires when its tenant said so."""
    return f"cotrain:checkpoint:{checkpoint_member(run_id, kind, name)}"


def checkpoint_member(run_id: RunId, kind: str, name: str) -> str:
    """Name a checkpoint in a set of checkpoints of many runs."""
    return f"{run_id}/{kind}/{name}"


def pending_checkpoint(run_id: RunId, kind: str, name: str) -> str:
    """Name the sorted set of weights that shall get this name once stored (score: their seq)."""
    return f"{checkpoint(run_id, kind, name)}:pending"


def run_checkpoints(run_id: RunId) -> str:
    """Name the sorted set of a run's checkpoints, `<kind>/<name>` (score: created_at, in s)."""
    return f"cotrain:run:{run_id}:checkpoints"


def tenant_checkpoints(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's checkpoints, as `checkpoint_member` (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:checkpoints"


def expiring_checkpoints(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's checkpoints that expire (score: expires_at, in s)."""
    return f"cotrain:tenant:{tenant}:expiring"


def checkpoint_bytes() -> str:
    """Name the sorted set of tenants (score: bytes of their checkpoints), for /metrics; none at 0 is in it."""
    return "cotrain:tenants:checkpoint_bytes"


def checkpoint_sizes(tenant: TenantId) -> str:
    """Name the hash `checkpoint_member` → bytes of a tenant's checkpoints."""
    return f"cotrain:tenant:{tenant}:checkpoint_sizes"


def unstored_checkpoints(tenant: TenantId) -> str:
    """Name the set of a tenant's named saves, as weights, that are not stored yet."""
    return f"cotrain:tenant:{tenant}:owed"


def published() -> str:
    """Name the set of checkpoints, as `checkpoint_member`, that every tenant may read."""
    return "cotrain:published"
