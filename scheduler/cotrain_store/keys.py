"""Every Redis key, one function each, with its owner and the reason for its lifetime.

`{pool}` is a hash tag: all keys of one pool would land on one node of a cluster. The scripts build
no key that is not made here: they get the pool's prefix and append the same suffixes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cotrain_store.messages.ids import (
        PoolId,
        RequestId,
        RunId,
        SamplerId,
        SessionId,
        TenantId,
        WeightsRef,
        WorkerId,
    )

#: Bumped when a key or a message changes; a process refuses a store of another version.
SCHEMA_VERSION = "2"

#: A session that sent no heartbeat for this long is shown as gone; the SDK beats every 10 s and
#: itself warns after 120 s.
SESSION_BEAT_TTL_MS = 180_000
#: A worker that has not said it is alive for this long is not counted as ready.
WORKER_BEAT_TTL_MS = 10_000
#: The scheduler's lease: decides who tries, not who may (the epoch does that).
LEASE_TTL_MS = 3_000
#: A client may sleep over lunch or overnight and still learn its outcome.
SMALL_RESULT_TTL_MS = 24 * 3600 * 1000
#: Results above the inline limit sit on disk; two hours bound what an absent client can hold.
LARGE_RESULT_TTL_MS = 2 * 3600 * 1000
#: Once its client has certainly read it, a result is kept for no more than a curious second look.
READ_RESULT_TTL_MS = 300_000
#: The record of a sample request outlives its result by this, to tell expired from never seen.
SAMPLE_RECORD_EXTRA_MS = 3600 * 1000
#: A sampler made by a save without a name goes after this long without a request…
EPHEMERAL_SAMPLER_IDLE_MS = 6 * 3600 * 1000
#: … and any other sampler after this long.
SAMPLER_IDLE_MS = 30 * 24 * 3600 * 1000
#: That a sample request has ended is told for this long, to a client that slept.
COMPLETION_TTL_MS = 24 * 3600 * 1000
#: What a tenant used is told for this long after its hour.
USAGE_TTL_S = 100 * 24 * 3600
#: The lane of sample requests that any worker of the pool may run; no worker has this id.
ANY_LANE = "*"
#: Cycle records kept for the dashboard and for debugging.
CYCLES_KEPT = 1_000


def schema() -> str:
    """Name the schema version key; lives for ever."""
    return "cotrain:schema"


def api_key(key_id: str) -> str:
    """Name an API key's hash (digest, tenant, not_after); removed when revoked."""
    return f"cotrain:key:{key_id}"


def api_keys() -> str:
    """Name the set of all API key ids; lives for ever."""
    return "cotrain:keys"


def session(session_id: SessionId) -> str:
    """Name a session's record; kept with its runs."""
    return f"cotrain:session:{session_id}"


def session_beat(session_id: SessionId) -> str:
    """Name a session's sign of life; expires by itself."""
    return f"cotrain:session:{session_id}:beat"


def session_runs(session_id: SessionId) -> str:
    """Name the set of a session's runs; kept with the session."""
    return f"cotrain:session:{session_id}:runs"


def run(run_id: RunId) -> str:
    """Name a run's record (owner, pool, LoRA settings); kept until the tenant deletes it."""
    return f"cotrain:run:{run_id}"


def tenant_runs(tenant: TenantId) -> str:
    """Name the set of a tenant's live runs: the quota counts it."""
    return f"cotrain:tenant:{tenant}:runs"


def training_runs(tenant: TenantId) -> str:
    """Name the sorted set of all runs of a tenant (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:training_runs"


def tenant_sessions(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's sessions (score: created_at, in s)."""
    return f"cotrain:tenant:{tenant}:sessions"


def living_sessions(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's sessions that are alive (score: until when, in ms)."""
    return f"cotrain:tenant:{tenant}:living_sessions"


def tenant_samplers(tenant: TenantId) -> str:
    """Name the sorted set of a tenant's samplers (score: when they expire without use, in ms)."""
    return f"cotrain:tenant:{tenant}:samplers"


def unread(tenant: TenantId) -> str:
    """Name the hash request → bytes of its result, of those never sent; `bytes` is their sum."""
    return f"cotrain:tenant:{tenant}:unread"


def unread_until(tenant: TenantId) -> str:
    """Name the sorted set of the results in `unread` (score: when they expire, in ms)."""
    return f"cotrain:tenant:{tenant}:unread_until"


def pools() -> str:
    """Name the hash of pools (id → PoolRecord); a worker writes its own at start."""
    return "cotrain:pools"


def scheduler_lease() -> str:
    """Name the scheduler's lease; expires by itself."""
    return "cotrain:scheduler:lease"


def scheduler_epoch() -> str:
    """Name the scheduler's fencing number; only grows."""
    return "cotrain:scheduler:epoch"


def result(request: RequestId) -> str:
    """Name a result; expires (SMALL_RESULT_TTL_MS, LARGE_RESULT_TTL_MS, READ_RESULT_TTL_MS)."""
    return f"cotrain:result:{request}"


def spool_segment_refs() -> str:
    """Name the hash spool segment → live references; a field goes when it reaches 0."""
    return "cotrain:spool:refs"


def notify_results() -> str:
    """Name the channel that carries the request ids of a commit."""
    return "cotrain:notify:results"


def notify_scheduler() -> str:
    """Name the channel that tells the scheduler that something became ready or free."""
    return "cotrain:notify:scheduler"


def notify_worker(pool: PoolId, worker: WorkerId) -> str:
    """Name the channel that tells a worker that a step or an order to drop a run is there."""
    return f"{prefix(pool)}notify:{worker}"


def prefix(pool: PoolId) -> str:
    """Start every key of a pool."""
    return f"cotrain:{hash_tag(pool)}"


def hash_tag(pool: PoolId) -> str:
    """Name a pool within a member of a set; `cotrain:` before it starts its keys."""
    return f"{{{pool}}}:"


def log(pool: PoolId, run_id: RunId) -> str:
    """Name a run's place in its log (next, done, snap, worker, state); kept with the run."""
    return f"{prefix(pool)}log:{run_id}"


def ops(pool: PoolId, run_id: RunId) -> str:
    """Name the hash seq → envelope; a field goes when a snapshot covers it."""
    return f"{prefix(pool)}ops:{run_id}"


def digests(pool: PoolId, run_id: RunId) -> str:
    """Name the hash seq → digest of what was accepted; the last 1,024 outlive their ops.

    Riders: also `key:<idempotency key>` → seq, and `rider:<seq>` → idempotency key.
    """
    return f"{prefix(pool)}digests:{run_id}"


def riders(pool: PoolId, run_id: RunId) -> str:
    """Name the sorted set of a run's riders (score: the first seq of the client behind it).

    A seq of the client has its place behind all riders with a score up to it. Goes with the log.
    """
    return f"{prefix(pool)}riders:{run_id}"


def bodies(pool: PoolId, run_id: RunId) -> str:
    """Name the hash seq → inline body; a field goes with its op."""
    return f"{prefix(pool)}bodies:{run_id}"


def ready(pool: PoolId) -> str:
    """Name the sorted set of runs whose next op is there (score: when it became so)."""
    return f"{prefix(pool)}ready"


def gaps(pool: PoolId) -> str:
    """Name the sorted set of runs that hold ops behind a missing seq (score: since when)."""
    return f"{prefix(pool)}gaps"


def queue(pool: PoolId, tenant: TenantId) -> str:
    """Name a tenant's queue counters (ops, tokens, bytes); all 0 at rest."""
    return f"{prefix(pool)}queue:{tenant}"


def queue_tenants(pool: PoolId) -> str:
    """Name the set of tenants that ever queued here; for the status page."""
    return f"{prefix(pool)}tenants"


def open_steps(pool: PoolId, worker: WorkerId) -> str:
    """Name the hash cycle → Step of one worker: planned and not yet committed."""
    return f"{prefix(pool)}open:{worker}"


def starts(pool: PoolId) -> str:
    """Name the hash cycle → how many processes died over it; a field goes with its step."""
    return f"{prefix(pool)}starts"


def deaths(pool: PoolId) -> str:
    """Name the hash part of a step → how many processes died over it; a field goes with its step.

    A part is named by the request that it begins with, and anything behind.
    """
    return f"{prefix(pool)}deaths"


def drops(pool: PoolId, worker: WorkerId) -> str:
    """Name the set of runs a worker shall drop from memory; emptied by the worker."""
    return f"{prefix(pool)}drops:{worker}"


def cycle_counter(pool: PoolId) -> str:
    """Name the number of the last cycle; only grows."""
    return f"{prefix(pool)}cycle"


def cycles(pool: PoolId) -> str:
    """Name the list of the last CYCLES_KEPT cycle records, newest first."""
    return f"{prefix(pool)}cycles"


def counters(pool: PoolId) -> str:
    """Name the hash of a pool's totals (cycles, tokens, …), for /metrics; only grow."""
    return f"{prefix(pool)}counters"


def worker(pool: PoolId, worker_id: WorkerId) -> str:
    """Name a worker's beat (JSON); expires by itself."""
    return f"{prefix(pool)}worker:{worker_id}"


def workers(pool: PoolId) -> str:
    """Name the set of worker ids that serve this pool; one that is gone for long is struck off.

    A run whose worker is none of these has none.
    """
    return f"{prefix(pool)}workers"


def worker_epoch(pool: PoolId, worker_id: WorkerId) -> str:
    """Name a worker's fencing number; only grows."""
    return f"{prefix(pool)}epoch:{worker_id}"


def sampler(sampler_id: SamplerId) -> str:
    """Name a sampler's record; expires when unused (EPHEMERAL_SAMPLER_IDLE_MS, SAMPLER_IDLE_MS)."""
    return f"cotrain:sampler:{sampler_id}"


def sampler_idle_ms(*, ephemeral: bool) -> int:
    """Say how long a sampler lives without a request."""
    return EPHEMERAL_SAMPLER_IDLE_MS if ephemeral else SAMPLER_IDLE_MS


def session_samplers(session_id: SessionId) -> str:
    """Name the set of a session's samplers; one that expired goes when somebody looks."""
    return f"cotrain:session:{session_id}:samplers"


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


def checkpoint_sizes(tenant: TenantId) -> str:
    """Name the hash `checkpoint_member` → bytes of a tenant's checkpoints."""
    return f"cotrain:tenant:{tenant}:checkpoint_sizes"


def owed_checkpoints(tenant: TenantId) -> str:
    """Name the set of a tenant's named saves, as weights, that are not stored yet."""
    return f"cotrain:tenant:{tenant}:owed"


def published() -> str:
    """Name the set of checkpoints, as `checkpoint_member`, that every tenant may read."""
    return "cotrain:published"


def usage(tenant: TenantId, hour: int) -> str:
    """Name the hash `<what>|<base model>|<session>|<run or sampler>` → amount of one hour.

    `hour` is its start, in s since the epoch. What: training_tokens, device_s, prefill_tokens (all
    of the prompt), cached_tokens (of them), sampled_tokens, checkpoints. USAGE_TTL_S.
    """
    return f"cotrain:usage:{tenant}:{hour}"


def audit(tenant: TenantId) -> str:
    """Name the stream of what a tenant did with its records; its last 10,000 or so are kept."""
    return f"cotrain:audit:{tenant}"


def signing_secret() -> str:
    """Name the hash of the secrets that links and tokens are signed with (current, previous)."""
    return "cotrain:secret:signing"


def weights(ref: WeightsRef) -> str:
    """Name the hash of weights (record, digest, size, optimizer); a worker forgets unused ones.

    While a named save is not stored: also its checkpoint, result and whatever else becomes of it then.
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


def sample(request: RequestId) -> str:
    """Name a sample request's hash; once resolved, only what a repeat needs, until it expires."""
    return f"cotrain:sample:{request}"


def sample_ring(pool: PoolId) -> str:
    """Name the list of tenants with waiting sample requests: whose turn is next stands first."""
    return f"{prefix(pool)}sample_ring"


def waiting_samples(pool: PoolId, lane: str, tenant: TenantId) -> str:
    """Name the list of a tenant's waiting sample requests that one lane may run."""
    return f"{prefix(pool)}waiting:{lane}:{tenant}"


def sample_load(pool: PoolId, tenant: TenantId) -> str:
    """Name a tenant's count of sample requests (waiting, running, bytes); all 0 at rest."""
    return f"{prefix(pool)}samples:{tenant}"


def claimed_samples(pool: PoolId, worker_id: WorkerId) -> str:
    """Name the list of sample requests that a worker runs, in the order of its claims."""
    return f"{prefix(pool)}claimed:{worker_id}"


def last_claim(pool: PoolId, worker_id: WorkerId) -> str:
    """Name the list of a worker's last claim (its token, its requests), should the answer be lost."""
    return f"{prefix(pool)}last_claim:{worker_id}"


def cancelled_samples(pool: PoolId, worker_id: WorkerId) -> str:
    """Name the set of claimed sample requests that a worker shall stop."""
    return f"{prefix(pool)}cancelled:{worker_id}"


def completions(sampler_id: SamplerId, clone: int) -> str:
    """Name the sorted set of a client's ended sample requests (COMPLETION_TTL_MS)."""
    return f"cotrain:completions:{sampler_id}:{clone}"


def notify_tokens() -> str:
    """Name the channel that carries the tokens of streaming sample requests."""
    return "cotrain:notify:tokens"
