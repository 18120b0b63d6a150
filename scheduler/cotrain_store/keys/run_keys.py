"""Redis keys of runs, of their logs and queues, of samplers and of sample requests."""

from __future__ import annotations

from cotrain_store.keys.fleet_keys import prefix
from cotrain_store.messages.ids import PoolId, RequestId, RunId, SamplerId, TenantId, WorkerId


def run(run_id: RunId) -> str:
    """Return the key of a run's record (owner, pool, LoRA settings); kept until the tenant deletes
    it.
    """
    return f"cotrain:run:{run_id}"


def steps(run_id: RunId) -> str:
    """Return the key of the list of a run's optimizer steps, one packed point each; at most 1,024,
    kept with the run.

    Steps and evaluations are deleted earlier when the tenant's quota is full:
    `tenant_keys.histories`.
    """
    return f"cotrain:run:{run_id}:steps"


def evaluations(run_id: RunId) -> str:
    """Return the key of the list of a run's forwards between optimizer steps; limits as in
    `steps`.
    """
    return f"cotrain:run:{run_id}:evaluations"


def history(run_id: RunId) -> str:
    """Return the key of the packed state of a run's history: its counters, and the passes since the
    last optimizer step.

    Kept as long as the run.
    """
    return f"cotrain:run:{run_id}:history"


def log(pool: PoolId, run_id: RunId) -> str:
    """Return the key of the hash with the state of a run's log (next, done, snap, worker, state);
    kept with the run.

    * `weight` is the size charged for the run, and `unwritten` the part of it not yet written to
      disk.
    * `given_up_ops`, `given_up_bytes` and `given_up_since` exist while ops behind a gap are given
      up.
    * `begun` exists while a pass is open in a worker: its seq, its executed tokens, and the
      process' epoch.
    * `moved_ms` is the time of the last move.
    """
    return f"{prefix(pool)}log:{run_id}"


def ops(pool: PoolId, run_id: RunId) -> str:
    """Return the key of the hash seq → envelope; a field is deleted when a snapshot covers it."""
    return f"{prefix(pool)}ops:{run_id}"


def bodies(pool: PoolId, run_id: RunId) -> str:
    """Return the key of the hash seq → inline body; a field is deleted with its op."""
    return f"{prefix(pool)}bodies:{run_id}"


def digests(pool: PoolId, run_id: RunId) -> str:
    """Return the key of the hash seq → digest of the accepted request; the last 1,024 outlive their
    ops.

    Unnumbered ops also have `key:<idempotency key>` → seq, and `rider:<seq>` → idempotency key.
    """
    return f"{prefix(pool)}digests:{run_id}"


def unnumbered_ops(pool: PoolId, run_id: RunId) -> str:
    """Return the key of the sorted set of a run's unnumbered ops (score: the client's first seq
    after it).

    A client seq follows, in the log, all unnumbered ops with a score up to it. Deleted with the
    log.
    """
    return f"{prefix(pool)}riders:{run_id}"


def ready(pool: PoolId) -> str:
    """Return the key of the sorted set of runs whose next op has arrived (score: time of arrival or
    of the last turn).
    """
    return f"{prefix(pool)}ready"


def changed(pool: PoolId) -> str:
    """Return the key of the sorted set of runs whose queue changed (score: the number of its last
    change).

    Changes that a scheduler has read are removed with its next plan. A scheduler with a new epoch
    reads everything.
    """
    return f"{prefix(pool)}changed"


def change_counter(pool: PoolId) -> str:
    """Return the key of the number of the last queue change; only increases."""
    return f"{prefix(pool)}changes"


def gaps(pool: PoolId) -> str:
    """Return the key of the sorted set of runs that hold ops behind a missing seq (score: start
    time).
    """
    return f"{prefix(pool)}gaps"


def queue(pool: PoolId, tenant: TenantId) -> str:
    """Return the key of a tenant's queue counters (ops, tokens, bytes); deleted when all are 0."""
    return f"{prefix(pool)}queue:{tenant}"


def queue_tenants(pool: PoolId) -> str:
    """Return the key of the set of tenants with queued or running work in this pool; idle tenants
    are removed.
    """
    return f"{prefix(pool)}tenants"


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


def sampler(sampler_id: SamplerId) -> str:
    """Return the key of a sampler's record; expires when unused (EPHEMERAL_SAMPLER_IDLE_MS,
    SAMPLER_IDLE_MS; `age_keys`).
    """
    return f"cotrain:sampler:{sampler_id}"


def sampler_idle_ms(*, ephemeral: bool) -> int:
    """Return the idle lifetime of a sampler, in ms."""
    return EPHEMERAL_SAMPLER_IDLE_MS if ephemeral else SAMPLER_IDLE_MS


def sample(request: RequestId) -> str:
    """Return the key of a sample request's hash. Once resolved, it keeps only the fields that a
    repeat needs.
    """
    return f"cotrain:sample:{request}"


def sample_ring(pool: PoolId) -> str:
    """Return the key of the list of tenants with waiting sample requests; the next to be served is
    first.
    """
    return f"{prefix(pool)}sample_ring"


def waiting_samples(pool: PoolId, queue: str, tenant: TenantId) -> str:
    """Return the key of the list of a tenant's waiting sample requests for one worker, or for any
    (ANY_WORKER).
    """
    return f"{prefix(pool)}waiting:{queue}:{tenant}"


def sample_load(pool: PoolId, tenant: TenantId) -> str:
    """Return the key of a tenant's sample counters (waiting, running, bytes, tokens); deleted when
    all are 0.
    """
    return f"{prefix(pool)}samples:{tenant}"


def claimed_samples(pool: PoolId, worker_id: WorkerId) -> str:
    """Return the key of the list of sample requests that a worker runs, in the order of its
    claims.
    """
    return f"{prefix(pool)}claimed:{worker_id}"


def last_claim(pool: PoolId, worker_id: WorkerId) -> str:
    """Return the key of the list of a worker's last claim (token, requests), for a lost reply."""
    return f"{prefix(pool)}last_claim:{worker_id}"


def cancelled_samples(pool: PoolId, worker_id: WorkerId) -> str:
    """Return the key of the set of claimed sample requests that a worker must stop."""
    return f"{prefix(pool)}cancelled:{worker_id}"


def completions(sampler_id: SamplerId, clone: int) -> str:
    """Return the key of the sorted set of a client's ended sample requests; expires
    (COMPLETION_TTL_MS).
    """
    return f"cotrain:completions:{sampler_id}:{clone}"


def notify_tokens() -> str:
    """Return the channel that carries the tokens of streaming sample requests."""
    return "cotrain:notify:tokens"
