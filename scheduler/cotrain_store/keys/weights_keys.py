"""Redis keys of weights, and of the checkpoints that name them."""

from collections.abc import Callable

from cotrain_store.messages.ids import PoolId, RunId, TenantId, WeightsRef, WorkerId

#: Hash of weights (record, digest, size, optimizer); a worker deletes unused ones.
#: `history` is the state of the run's history at that save. Until a named save is stored, the hash also has
#: its checkpoint, result and further records of the save.
weights: Callable[[WeightsRef], str] = "cotrain:weights:{}".format
#: Set of users of weights; deleted with the weights.
#: `s:` is a sampler, `c:` a checkpoint, `l:{pool}:<run>:<seq>` a load in the run's log.
weights_users: Callable[[WeightsRef], str] = "cotrain:weights:{}:users".format
#: Set of all weights of a pool.
pool_weights: Callable[[PoolId], str] = "cotrain:{{{}}}:weights".format
#: Sorted set of weights that lost a user (score: time of the next check).
released_weights: Callable[[PoolId], str] = "cotrain:{{{}}}:released".format
#: Set of weights with identical content, which share one folder.
content: Callable[[PoolId, str], str] = "cotrain:{{{}}}:content:{}".format
#: Set of weights with identical optimizer state, which share one file.
optimizer_content: Callable[[PoolId, str], str] = "cotrain:{{{}}}:optimizer:{}".format
#: Set of folders of encrypted files (`external_folder`).
external_folders: Callable[[PoolId], str] = "cotrain:{{{}}}:external".format
#: Set of weights that exist only on one worker until it stores them.
unstored_weights: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:unstored:{}".format
#: Record of a checkpoint; expires if its tenant set a lifetime. Arguments: run, kind, name.
checkpoint: Callable[[RunId, str, str], str] = "cotrain:checkpoint:{}/{}/{}".format
#: Member for a checkpoint in a set of checkpoints of many runs.
checkpoint_member: Callable[[RunId, str, str], str] = "{}/{}/{}".format
#: Sorted set of weights that will get this name once stored (score: their seq).
pending_checkpoint: Callable[[RunId, str, str], str] = "cotrain:checkpoint:{}/{}/{}:pending".format
#: Sorted set of a run's checkpoints, `<kind>/<name>` (score: created_at, in s).
run_checkpoints: Callable[[RunId], str] = "cotrain:run:{}:checkpoints".format
#: Sorted set of a tenant's checkpoints, as `checkpoint_member` (score: created_at, in s).
tenant_checkpoints: Callable[[TenantId], str] = "cotrain:tenant:{}:checkpoints".format
#: Sorted set of a tenant's checkpoints that expire (score: expires_at, in s).
expiring_checkpoints: Callable[[TenantId], str] = "cotrain:tenant:{}:expiring".format
#: Sorted set of tenants (score: bytes of their checkpoints), for /metrics, without tenants at 0.
checkpoint_bytes: Callable[[], str] = "cotrain:tenants:checkpoint_bytes".format
#: Hash `checkpoint_member` → bytes, for a tenant's checkpoints.
checkpoint_sizes: Callable[[TenantId], str] = "cotrain:tenant:{}:checkpoint_sizes".format
#: Set of a tenant's named saves, as weights, that are not stored yet.
unstored_checkpoints: Callable[[TenantId], str] = "cotrain:tenant:{}:owed".format
#: Set of checkpoints, as `checkpoint_member`, that every tenant may read.
published: Callable[[], str] = "cotrain:published".format
