"""Redis keys of weights, and of the checkpoints that name them."""

from __future__ import annotations

from cotrain_store.keys.fleet_keys import prefix
from cotrain_store.messages.ids import PoolId, RunId, TenantId, WeightsRef, WorkerId


def weights(ref: WeightsRef) -> str:
    """Return the key of the hash of weights (record, digest, size, optimizer); a worker deletes
    unused ones.

    `history` is the state of the run's history at that save. Until a named save is stored, the hash
    also has its checkpoint, result and further records of the save.
    """
    return f"cotrain:weights:{ref}"


def weights_users(ref: WeightsRef) -> str:
    """Return the key of the set of users of weights; deleted with the weights.

    `s:` is a sampler, `c:` a checkpoint, `l:{pool}:<run>:<seq>` a load in the run's log.
    """
    return f"cotrain:weights:{ref}:users"


def pool_weights(pool: PoolId) -> str:
    """Return the key of the set of all weights of a pool."""
    return f"{prefix(pool)}weights"


def released_weights(pool: PoolId) -> str:
    """Return the key of the sorted set of weights that lost a user (score: time of the next
    check).
    """
    return f"{prefix(pool)}released"


def content(pool: PoolId, digest: str) -> str:
    """Return the key of the set of weights with identical content, which share one folder."""
    return f"{prefix(pool)}content:{digest}"


def optimizer_content(pool: PoolId, digest: str) -> str:
    """Return the key of the set of weights with identical optimizer state, which share one file."""
    return f"{prefix(pool)}optimizer:{digest}"


def external_folders(pool: PoolId) -> str:
    """Return the key of the set of folders of encrypted files (`external_folder`)."""
    return f"{prefix(pool)}external"


def unstored_weights(pool: PoolId, worker_id: WorkerId) -> str:
    """Return the key of the set of weights that exist only on one worker until it stores them."""
    return f"{prefix(pool)}unstored:{worker_id}"


def checkpoint(run_id: RunId, kind: str, name: str) -> str:
    """Return the key of a checkpoint's record; expires if its tenant set a lifetime."""
    return f"cotrain:checkpoint:{checkpoint_member(run_id, kind, name)}"


def checkpoint_member(run_id: RunId, kind: str, name: str) -> str:
    """Return the member for a checkpoint in a set of checkpoints of many runs."""
    return f"{run_id}/{kind}/{name}"


def pending_checkpoint(run_id: RunId, kind: str, name: str) -> str:
    """Return the key of the sorted set of weights that will get this name once stored (score: their
    seq).
    """
    return f"{checkpoint(run_id, kind, name)}:pending"


def run_checkpoints(run_id: RunId) -> str:
    """Return the key of the sorted set of a run's checkpoints, `<kind>/<name>` (score: created_at, in s)."""
    return f"cotrain:run:{run_id}:checkpoints"


def tenant_checkpoints(tenant: TenantId) -> str:
    """Return the key of the sorted set of a tenant's checkpoints, as `checkpoint_member` (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:checkpoints"


def expiring_checkpoints(tenant: TenantId) -> str:
    """Return the key of the sorted set of a tenant's checkpoints that expire (score: expires_at, in s)."""
    return f"cotrain:tenant:{tenant}:expiring"


def checkpoint_bytes() -> str:
    """Return the key of the sorted set of tenants (score: bytes of their checkpoints), for
    /metrics, without tenants at 0.
    """
    return "cotrain:tenants:checkpoint_bytes"


def checkpoint_sizes(tenant: TenantId) -> str:
    """Return the key of the hash `checkpoint_member` → bytes, for a tenant's checkpoints."""
    return f"cotrain:tenant:{tenant}:checkpoint_sizes"


def unstored_checkpoints(tenant: TenantId) -> str:
    """Return the key of the set of a tenant's named saves, as weights, that are not stored yet."""
    return f"cotrain:tenant:{tenant}:owed"


def published() -> str:
    """Return the key of the set of checkpoints, as `checkpoint_member`, that every tenant may read."""
    return "cotrain:published"
