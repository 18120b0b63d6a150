"""Redis keys of runs, of their logs and queues, of samplers and of sample requests."""

from collections.abc import Callable

from cotrain_store.messages.ids import PoolId, RequestId, RunId, SamplerId, TenantId, WorkerId

#: Record of a run (owner, pool, LoRA settings); kept until the tenant deletes it.
run: Callable[[RunId], str] = "cotrain:run:{}".format
#: List of a run's optimizer steps, one packed point each; at most 1,024, kept with the run.
#: Steps and evaluations are deleted earlier when the tenant's quota is full: `tenant_keys.histories`.
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
#: Sorted set of a run's unnumbered ops (score: the client's first seq after it).
#: A client seq follows, in the log, all unnumbered ops with a score up to it. Deleted with the log.
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

#: Record of the sampler; expires when unused (EPHEMERAL_SAMPLER_IDLE_MS, SAMPLER_IDLE_MS; `age_keys`).
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
