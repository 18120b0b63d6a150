"""Redis keys, each a typed template with its owner and the reason for its lifetime.

`{pool}` is a hash tag: all keys of one pool would be stored on one node of a cluster. Scripts
get ids and the pool's prefix, and make the same keys of them; a test finds a key that is not made here.
"""

from collections.abc import Callable

from cotrain_store.messages.ids import PoolId, RequestId, RunId, SamplerId, SessionId, TenantId, WeightsRef, WorkerId

# ---- The store, its pools and workers, and the scheduler -----------------------------------------

#: Version of keys and messages, increased when one changes. A process refuses a store of another version.
SCHEMA_VERSION = "3"
#: A worker without a heartbeat for this long does not count as ready.
WORKER_HEARTBEAT_TTL_MS = 10_000
#: The scheduler's lease decides who tries to lead. The epoch decides who may write.
LEASE_TTL_MS = 3_000
#: Number of cycle records kept for the dashboard and for debugging.
CYCLES_KEPT = 1_000
#: Lifetime of the hash of a minute. The pages show one hour.
MINUTE_TTL_S = 2 * 3600
#: Lifetime of the exits of workers after the newest one.
EXITS_TTL_S = 7 * 24 * 3600

#: Schema version; kept permanently.
schema: Callable[[], str] = "cotrain:schema".format
#: Random name of this Redis; kept permanently. Its data folder holds the same name.
name: Callable[[], str] = "cotrain:name".format
#: Lease of the worker that sweeps spool and recovery copies in an object store (SweepLease).
sweeper: Callable[[], str] = "cotrain:sweeper".format
#: Lease of the worker that sweeps a pool's saved weights in an object store (SweepLease).
pool_sweeper: Callable[[PoolId], str] = "cotrain:{{{}}}:sweeper".format
#: Hash of pools (id → PoolRecord). A worker writes its own at start.
pools: Callable[[], str] = "cotrain:pools".format
#: Prefix of every key of a pool.
prefix: Callable[[PoolId], str] = "cotrain:{{{}}}:".format
#: Part of a set member that names a pool; `cotrain:` before it is the prefix of the pool's keys.
hash_tag: Callable[[PoolId], str] = "{{{}}}:".format
#: Lease of the scheduler; expires unless renewed.
scheduler_lease: Callable[[], str] = "cotrain:scheduler:lease".format
#: Fencing number of the scheduler; only increases.
scheduler_epoch: Callable[[], str] = "cotrain:scheduler:epoch".format
#: Channel that wakes the scheduler when a run became ready or a worker free.
notify_scheduler: Callable[[], str] = "cotrain:notify:scheduler".format
#: Channel that notifies a worker of a step, or of an order to drop a run.
notify_worker: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:notify:{}".format
#: Set of worker ids that serve this pool. Workers without a heartbeat for a long time are removed. A run whose worker
#: is not in the set has no worker.
workers: Callable[[PoolId], str] = "cotrain:{{{}}}:workers".format
#: Hash worker id → time (s) of the operator's drain request, until it is withdrawn.
#: The field outlives the worker's processes.
draining: Callable[[PoolId], str] = "cotrain:{{{}}}:draining".format
#: Hash worker id → time (s) of the operator's request for a self-check; the worker deletes it when it begins.
self_checks: Callable[[PoolId], str] = "cotrain:{{{}}}:self_checks".format
#: Hash of planned moves (run → `owner>target`); a field is deleted with its move.
moves: Callable[[PoolId], str] = "cotrain:{{{}}}:moves".format
#: Scaling decision of a pool (JSON `Scaling`), written by the leading scheduler.
scaling: Callable[[PoolId], str] = "cotrain:{{{}}}:scaling".format
#: Heartbeat of the worker (JSON); expires unless renewed.
worker: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:worker:{}".format
#: Fencing number of the worker; only increases.
worker_epoch: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:epoch:{}".format
#: Hash of a base model (worker id → WorkerExit), written by their supervisor or by the workers. It expires (EXITS_TTL_S).
worker_exits: Callable[[str], str] = "cotrain:exits:{}".format
#: Hash of one worker's open steps (cycle → Step): planned and not yet committed.
open_steps: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:open:{}".format
#: Set of runs that a worker must drop from memory; emptied by the worker.
drops: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:drops:{}".format
#: Hash cycle → number of processes that crashed during it, less one: the first crash is assumed.
#: -1: that process did not crash. A field is deleted with its step.
starts: Callable[[PoolId], str] = "cotrain:{{{}}}:starts".format
#: Hash step part → number of processes that crashed during it.
#: A field is deleted with its step. Its name begins with the first request of the part.
crash_counts: Callable[[PoolId], str] = "cotrain:{{{}}}:deaths".format
#: Number of the last cycle; only increases.
cycle_counter: Callable[[PoolId], str] = "cotrain:{{{}}}:cycle".format
#: List of the last CYCLES_KEPT cycle records, newest first.
cycles: Callable[[PoolId], str] = "cotrain:{{{}}}:cycles".format
#: Hash of a pool's counts in the minute that starts at `start_s`; expires (MINUTE_TTL_S).
minute: Callable[[PoolId, int], str] = "cotrain:{{{}}}:minute:{}".format
#: Hash of a pool's totals (cycles, tokens, …), for /metrics; they only increase. `moves` counts runs that moved to
#: another worker. `runs_made`, `runs_closed` and `runs_failed` count runs.
counters: Callable[[PoolId], str] = "cotrain:{{{}}}:counters".format
#: Hash of the failed and refused requests of all tenants in the minute that starts at `start_s`
#: (`failed|<tenant>`, `refused|<tenant>` → count); expires (MINUTE_TTL_S).
failures: Callable[[int], str] = "cotrain:failures:{}".format
#: Hash of the newest failure and refusal of each tenant, by the same fields (JSON); expires with them.
newest_failures: Callable[[], str] = "cotrain:failures:newest".format
#: Hash `<pool>|<tenant>` → failed requests, for /metrics; they only increase.
failure_totals: Callable[[], str] = "cotrain:failures:totals".format

# ---- Tenants, their API keys and sessions, and the lists of their records ------------------------

#: A session without a heartbeat for this long is shown as ended. The SDK sends one every 10 s and
#: itself warns after 120 s.
SESSION_HEARTBEAT_TTL_MS = 180_000
#: Lifetime of the usage of an hour.
USAGE_TTL_S = 100 * 24 * 3600

#: Hash of an issued API key (digest, tenant, not_after); removed when revoked.
api_key: Callable[[str], str] = "cotrain:key:{}".format
#: Set of the ids of issued API keys; kept permanently.
api_keys: Callable[[], str] = "cotrain:keys".format
#: Hash tenant id → display name: the name of its first key; kept permanently.
tenant_names: Callable[[], str] = "cotrain:tenants:names".format
#: Hash of a chosen key's digest → id and tenant (JSON); kept permanently, authenticates nothing.
chosen_keys: Callable[[], str] = "cotrain:keys:chosen".format
#: Hash key id → record (JSON), for the keys in the settings of the API started last.
settings_keys: Callable[[], str] = "cotrain:keys:settings".format
#: Hash key id → time of last use (s); a field is deleted with the key.
key_uses: Callable[[], str] = "cotrain:keys:used".format
#: Hash quota → limit that the operator set for a tenant; other quotas have their default.
#: A field is kept until the limit is removed.
limits: Callable[[TenantId], str] = "cotrain:tenant:{}:limits".format
#: Hash tenant → weight in fair queueing. A missing field is 1; setting 1 removes it.
tenant_weights: Callable[[], str] = "cotrain:tenants:weights".format
#: Hash tenant → its pause (JSON); a field is kept until the tenant is resumed.
paused_tenants: Callable[[], str] = "cotrain:tenants:paused".format
#: Hash run → its pause (JSON); a field is kept until the run is resumed or ends.
paused_runs: Callable[[], str] = "cotrain:runs:paused".format
#: Hash of the secrets (current, previous) that sign links and tokens.
signing_secret: Callable[[], str] = "cotrain:secret:signing".format
#: Mark of a browser session ended by a logout; expires with the session.
ended_session: Callable[[str], str] = "cotrain:ui:ended:{}".format
#: Record of the session; kept with its runs.
session: Callable[[SessionId], str] = "cotrain:session:{}".format
#: Heartbeat of the session; expires unless renewed.
session_heartbeat: Callable[[SessionId], str] = "cotrain:session:{}:beat".format
#: Set of a session's runs; kept with the session.
session_runs: Callable[[SessionId], str] = "cotrain:session:{}:runs".format
#: Set of a session's samplers; expired ones are removed when the set is read.
session_samplers: Callable[[SessionId], str] = "cotrain:session:{}:samplers".format
#: Set of a tenant's live runs, counted by the quota.
tenant_runs: Callable[[TenantId], str] = "cotrain:tenant:{}:runs".format
#: Sorted set of all runs of a tenant (score: created_at, in s).
training_runs: Callable[[TenantId], str] = "cotrain:tenant:{}:training_runs".format
#: Sorted set of the runs of all tenants (score: created_at, in s); kept permanently.
all_training_runs: Callable[[], str] = "cotrain:training_runs".format
#: Sorted set of a tenant's runs with a note or a tag (score: created_at, in s).
labelled_runs: Callable[[TenantId], str] = "cotrain:tenant:{}:labelled_runs".format
#: Sorted set of a tenant's sessions (score: created_at, in s).
tenant_sessions: Callable[[TenantId], str] = "cotrain:tenant:{}:sessions".format
#: Sorted set of a tenant's live sessions (score: end of life without a heartbeat, in ms).
living_sessions: Callable[[TenantId], str] = "cotrain:tenant:{}:living_sessions".format
#: Sorted set of a tenant's samplers (score: expiry without use, in ms).
tenant_samplers: Callable[[TenantId], str] = "cotrain:tenant:{}:samplers".format
#: Hash of weight sizes, and their sum, for samplers made by a save without a name. Deleted with the samplers.
sampler_bytes: Callable[[TenantId], str] = "cotrain:tenant:{}:sampler_bytes".format
#: Byte count of a tenant's records of sessions and runs, which are kept permanently.
record_bytes: Callable[[TenantId], str] = "cotrain:tenant:{}:record_bytes".format
#: Sorted set of a tenant's runs with a history (score: its newest point, in s).
#: The oldest histories are deleted when the quota of points is full.
histories: Callable[[TenantId], str] = "cotrain:tenant:{}:histories".format
#: Hash of a tenant's number of history points, and the quota when its newest run was made.
history_points: Callable[[TenantId], str] = "cotrain:tenant:{}:history".format
#: Sorted set of tenants (score: bytes that their runs hold); tenants at 0 are removed.
run_bytes: Callable[[], str] = "cotrain:tenants:run_bytes".format
#: Number of bytes that all runs may still write; kept permanently.
unwritten_run_bytes: Callable[[], str] = "cotrain:run_bytes:unwritten".format
#: Hash of one hour, `<amount>|<base model>|<session>|<run or sampler>` → value.
#: `hour` is its start, in s since the epoch. Amounts: training_tokens, device_s, prefill_tokens (the whole
#: prompt), cached_tokens (part of it), sampled_tokens, checkpoints. Expires (USAGE_TTL_S).
usage: Callable[[TenantId, int], str] = "cotrain:usage:{}:{}".format
#: Stream of changes of a tenant and its records; about the last 10,000 are kept.
audit: Callable[[TenantId], str] = "cotrain:audit:{}".format
#: Stream of the actions of all tenants and the operator; about the last 10,000 are kept.
audit_of_all: Callable[[], str] = "cotrain:audit".format

# ---- Webhooks and their undelivered events -------------------------------------------------------

#: Lease timeout of the webhook sender.
WEBHOOK_LEASE_MS = 10_000

#: Hash of a tenant's webhook (id, url, secret, drift_above, outcomes of its events), until removed.
webhook: Callable[[TenantId], str] = "cotrain:tenant:{}:webhook".format
#: Hash event id → arrival (ms), attempts and body; a field is deleted with its event.
events: Callable[[TenantId], str] = "cotrain:tenant:{}:webhook_events".format
#: Sorted set of those events (score: next attempt, in ms of the store's clock).
due_events: Callable[[TenantId], str] = "cotrain:tenant:{}:webhook_due".format
#: Sorted set of tenants with events (score: when the first one is due, in ms).
due_tenants: Callable[[], str] = "cotrain:webhooks:due".format
#: Lease of the webhook sender; expires unless renewed.
webhook_lease: Callable[[], str] = "cotrain:webhooks:lease".format
#: Number of the newest webhook sender; kept permanently, only increases.
webhook_epoch: Callable[[], str] = "cotrain:webhooks:epoch".format

# ---- Runs, their logs and queues -----------------------------------------------------------------

#: Record of a run (owner, pool, LoRA settings); kept until the tenant deletes it.
run: Callable[[RunId], str] = "cotrain:run:{}".format
#: List of a run's optimizer steps, one packed point each; at most 1,024, kept with the run.
#: Steps and evaluations are deleted earlier when the tenant's quota is full: `histories`.
steps: Callable[[RunId], str] = "cotrain:run:{}:steps".format
#: List of a run's forwards between optimizer steps; limits as in `steps`.
evaluations: Callable[[RunId], str] = "cotrain:run:{}:evaluations".format
#: Hash metric → number of its points so far. The names that a run's history has.
metric_names: Callable[[RunId], str] = "cotrain:run:{}:metrics".format
#: List of the points of one metric; limits as in `steps`.
metric: Callable[[RunId, str], str] = "cotrain:run:{}:metric:{}".format
#: Packed state of a run's history: its counters, and the passes since the last optimizer step. Kept as long as the run.
history: Callable[[RunId], str] = "cotrain:run:{}:history".format
#: Hash with the state of a run's log (next, done, snap, worker, state); kept with the run.
#: * `weight` is the size charged for the run, and `unwritten` the part of it not yet written to disk.
#: * `given_up_ops`, `given_up_bytes` and `given_up_since` exist while ops behind a gap are given up.
#: * `begun` exists while a pass is open in a worker: its seq, its executed tokens, and the process' epoch.
#: * `step:<seq>` is the number of an optimizer step in the log.
#: * `rewind:<seq>` is the seq to which a REWIND returned.
#: * `rewound` is the seq of the last REWIND. No recovery copy before it is registered any more.
#: * `moved_ms` is the time of the last move.
#: * `source` is the reference of the weights that a fork began with, if they were not stored then.
log: Callable[[PoolId, RunId], str] = "cotrain:{{{}}}:log:{}".format
#: Hash seq → envelope; a field is deleted when a snapshot covers it.
ops: Callable[[PoolId, RunId], str] = "cotrain:{{{}}}:ops:{}".format
#: Hash seq → inline body; a field is deleted with its op.
bodies: Callable[[PoolId, RunId], str] = "cotrain:{{{}}}:bodies:{}".format
#: Hash seq → digest of the accepted request; the last 1,024 outlive their ops.
#: Unnumbered ops also have `key:<idempotency key>` → seq, and `rider:<seq>` → idempotency key.
digests: Callable[[PoolId, RunId], str] = "cotrain:{{{}}}:digests:{}".format
#: Sorted set of the log seqs of a run's unnumbered ops (score: the first seq_id of the client after it). So the log seq
#: of a request is its seq_id plus the number of unnumbered ops with a score up to it. Deleted with the log.
unnumbered_ops: Callable[[PoolId, RunId], str] = "cotrain:{{{}}}:riders:{}".format
#: Sorted set of runs whose next op has arrived (score: time of arrival or of the last turn).
ready: Callable[[PoolId], str] = "cotrain:{{{}}}:ready".format
#: Sorted set of runs whose queue changed (score: the number of its last change). Changes that a scheduler has read are
#: removed with its next plan. A scheduler with a new epoch reads everything.
changed: Callable[[PoolId], str] = "cotrain:{{{}}}:changed".format
#: Number of the last queue change; only increases.
change_counter: Callable[[PoolId], str] = "cotrain:{{{}}}:changes".format
#: Sorted set of runs that hold ops behind a missing seq (score: start time).
gaps: Callable[[PoolId], str] = "cotrain:{{{}}}:gaps".format
#: Queue counters of a tenant (ops, tokens, bytes); deleted when all are 0.
queue: Callable[[PoolId, TenantId], str] = "cotrain:{{{}}}:queue:{}".format
#: Set of tenants with queued or running work in this pool; idle tenants are removed.
queue_tenants: Callable[[PoolId], str] = "cotrain:{{{}}}:tenants".format

# ---- Samplers and sample requests ----------------------------------------------------------------

#: The record of a sample request outlives its result by this time, so that an expired request
#: differs from an unknown one.
SAMPLE_RECORD_EXTRA_MS = 3600 * 1000
#: Idle lifetime of a sampler made by a save without a name.
EPHEMERAL_SAMPLER_IDLE_MS = 6 * 3600 * 1000
#: Idle lifetime of any other sampler.
SAMPLER_IDLE_MS = 30 * 24 * 3600 * 1000
#: Lifetime of the notice that a sample request has ended, for a suspended client.
COMPLETION_TTL_MS = 24 * 3600 * 1000
#: Queue of the sample requests that any worker of the pool may run. No worker has this id.
ANY_WORKER = "*"

#: Record of the sampler; expires when unused (EPHEMERAL_SAMPLER_IDLE_MS, SAMPLER_IDLE_MS; `scripts/lib/ages.lua`).
sampler: Callable[[SamplerId], str] = "cotrain:sampler:{}".format


def sampler_idle_ms(*, ephemeral: bool) -> int:
    """Return the idle lifetime of a sampler, in ms."""
    return EPHEMERAL_SAMPLER_IDLE_MS if ephemeral else SAMPLER_IDLE_MS


#: Sample request's hash. Once resolved, it keeps only the fields that a repeat needs.
sample: Callable[[RequestId], str] = "cotrain:sample:{}".format
#: List of tenants with waiting sample requests; the next to be served is first.
sample_ring: Callable[[PoolId], str] = "cotrain:{{{}}}:sample_ring".format
#: List of a tenant's waiting sample requests for one worker, or for any (ANY_WORKER).
waiting_samples: Callable[[PoolId, str, TenantId], str] = "cotrain:{{{}}}:waiting:{}:{}".format
#: Sample counters of the tenant (waiting, running, bytes, tokens); deleted when all are 0.
sample_load: Callable[[PoolId, TenantId], str] = "cotrain:{{{}}}:samples:{}".format
#: List of sample requests that a worker runs, in the order of its claims.
claimed_samples: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:claimed:{}".format
#: List of a worker's last claim (token, requests), for a lost reply.
last_claim: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:last_claim:{}".format
#: Set of claimed sample requests that a worker must stop.
cancelled_samples: Callable[[PoolId, WorkerId], str] = "cotrain:{{{}}}:cancelled:{}".format
#: Sorted set of a client's ended sample requests; expires (COMPLETION_TTL_MS).
completions: Callable[[SamplerId, int], str] = "cotrain:completions:{}:{}".format
#: Channel that carries the tokens of streaming sample requests.
notify_tokens: Callable[[], str] = "cotrain:notify:tokens".format

# ---- Weights, and the checkpoints that name them -------------------------------------------------

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

# ---- Results, the spool files that they occupy, and expiring keys --------------------------------

#: Lifetime of a small result. A client may sleep overnight and still read its outcome.
SMALL_RESULT_TTL_MS = 24 * 3600 * 1000
#: Lifetime of a result on disk, above the inline limit. Two hours bound the space that an absent client can occupy.
LARGE_RESULT_TTL_MS = 2 * 3600 * 1000
#: Remaining lifetime of a result after its client has certainly read it, for a repeated read.
READ_RESULT_TTL_MS = 300_000
#: Lifetime of a sweep mark. No process resumes a request after being suspended for a month.
SWEPT_TTL_MS = 30 * 24 * 3600 * 1000

#: Result; expires (SMALL_RESULT_TTL_MS, LARGE_RESULT_TTL_MS, READ_RESULT_TTL_MS; `scripts/lib/ages.lua`).
result: Callable[[RequestId], str] = "cotrain:result:{}".format
#: Hash request → bytes of its result, for results never sent; `bytes` is their sum.
unread: Callable[[TenantId], str] = "cotrain:tenant:{}:unread".format
#: Sorted set of the results in `unread` (score: expiry, in ms).
unread_until: Callable[[TenantId], str] = "cotrain:tenant:{}:unread_until".format
#: Sorted set of tenants with unread results (score: their bytes, expired results included).
unread_tenants: Callable[[], str] = "cotrain:tenants:unread".format
#: Hash spool segment → number of ops with a body in it; a field is deleted at 0.
spool_segment_refs: Callable[[], str] = "cotrain:spool:refs".format
#: Hash spool segment → number of results in it; a field is deleted at 0.
spool_results: Callable[[], str] = "cotrain:spool:results".format
#: Highest number of a writer's removed spool segments; expires (SWEPT_TTL_MS; `scripts/lib/ages.lua`).
spool_swept: Callable[[str], str] = "cotrain:spool:swept:{}".format
#: Channel that carries the request ids of a commit.
notify_results: Callable[[], str] = "cotrain:notify:results".format
#: Clock of the store, in ms; kept permanently, only increases.
#: It started at the time of day. Since then the leading scheduler advances it by a monotonic clock.
clock: Callable[[], str] = "cotrain:clock".format
#: Sorted set of expiring keys (score: expiry, by `clock`).
ends: Callable[[], str] = "cotrain:ends".format
