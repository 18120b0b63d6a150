"""The keys of runs: their records, their logs, and what waits in those.

The keys of samplers and of sample requests.
"""

from __future__ import annotations

from cotrain_store.keys.fleet_keys import prefix
from cotrain_store.messages.ids import PoolId, RequestId, RunId, SamplerId, TenantId, WorkerId


def run(run_id: RunId) -> str:
    """Name a run's record (owner, pool, LoRA settings); kept until the tenant deletes it."""
    return f"cotrain:run:{run_id}"


def steps(run_id: RunId) -> str:
    """Name the list of a run's optimizer steps, a packed point each; at most 1,024, kept with the run.

    Like those of its evaluations it goes earlier when its tenant's quota is full: `tenant_keys.histories`.
    """
    return f"cotrain:run:{run_id}:steps"


def evaluations(run_id: RunId) -> str:
    """Name the list of a run's forwards between optimizer steps, as `steps`."""
    return f"cotrain:run:{run_id}:evaluations"


def history(run_id: RunId) -> str:
    """Name where a run's history stands: what it counted, and what passes found since the last optimizer step.

    Packed, as long as the run.
    """
    return f"cotrain:run:{run_id}:history"


def log(pool: PoolId, run_id: RunId) -> str:
    """Name where a run's log stands (next, done, snap, worker, state); kept with the run.

    `weight`, `unwritten`: what the run counts for, and how much of that has still to be written to disk.
    While ops behind a gap are given up: `given_up_ops`, `given_up_bytes` and `given_up_since`. While a
    pass of it is open in a worker: `begun`, its seq, the tokens that ran, and that process' epoch. `moved_ms`: when
    it was moved last.
    """
    return f"{prefix(pool)}log:{run_id}"


def ops(pool: PoolId, run_id: RunId) -> str:
    """Name the hash seq → envelope; a field goes when a snapshot covers it."""
    return f"{prefix(pool)}ops:{run_id}"


def bodies(pool: PoolId, run_id: RunId) -> str:
    """Name the hash seq → inline body; a field goes with its op."""
    return f"{prefix(pool)}bodies:{run_id}"


def digests(pool: PoolId, run_id: RunId) -> str:
    """Name the hash seq → digest of what was accepted; the last 1,024 outlive their ops.

    Of unnumbered ops also `key:<idempotency key>` → seq, and `rider:<seq>` → idempotency key.
    """
    return f"{prefix(pool)}digests:{run_id}"


def unnumbered_ops(pool: PoolId, run_id: RunId) -> str:
    """Name the sorted set of a run's unnumbered ops (score: the first seq of the client behind it).

    A seq of the client lies in the log behind all of them with a score up to it. Goes with the log.
    """
    return f"{prefix(pool)}riders:{run_id}"


def ready(pool: PoolId) -> str:
    """Name the sorted set of runs whose next op is there (score: since when, or since their last turn)."""
    return f"{prefix(pool)}ready"


def changed(pool: PoolId) -> str:
    """Name the sorted set of runs whose queue changed (score: the number of its last change).

    What a scheduler has read is struck off with its next plan; a scheduler with a new epoch reads everything.
    """
    return f"{prefix(pool)}changed"


def change_counter(pool: PoolId) -> str:
    """Name the number of the last change of a queue; only grows."""
    return f"{prefix(pool)}changes"


def gaps(pool: PoolId) -> str:
    """Name the sorted set of runs that hold ops behind a missing seq (score: since when)."""
    return f"{prefix(pool)}gaps"


def queue(pool: PoolId, tenant: TenantId) -> str:
    """Name a tenant's queue counters (ops, tokens, bytes); they go when all are 0."""
    return f"{prefix(pool)}queue:{tenant}"


def queue_tenants(pool: PoolId) -> str:
    """Name the set of tenants for which something waits or runs here; one at 0 is struck off."""
    return f"{prefix(pool)}tenants"


#: The record of a sample request outlives its result by this, to tell expired from never seen.
SAMPLE_RECORD_EXTRA_MS = 3600 * 1000
#: A sampler made by a save without a name goes after this long without a request…
EPHEMERAL_SAMPLER_IDLE_MS = 6 * 3600 * 1000
#: … and any other sampler after this long.
SAMPLER_IDLE_MS = 30 * 24 * 3600 * 1000
#: That a sample request has ended is published for this long, to a client that slept.
COMPLETION_TTL_MS = 24 * 3600 * 1000
#: The queue of sample requests that any worker of the pool may run; no worker has this id.
ANY_WORKER = "*"


def sampler(sampler_id: SamplerId) -> str:
    """Name a sampler's record; ends when unused (EPHEMERAL_SAMPLER_IDLE_MS, SAMPLER_IDLE_MS; `age_keys`)."""
    return f"cotrain:sampler:{sampler_id}"


def sampler_idle_ms(*, ephemeral: bool) -> int:
    """Say how long a sampler lives without a request."""
    return EPHEMERAL_SAMPLER_IDLE_MS if ephemeral else SAMPLER_IDLE_MS


def sample(request: RequestId) -> str:
    """Name a sample request's hash; once resolved, only what a repeat needs, until it expires."""
    return f"cotrain:sample:{request}"


def sample_ring(pool: PoolId) -> str:
    """Name the list of tenants with waiting sample requests: the one to be served next stands first."""
    return f"{prefix(pool)}sample_ring"


def waiting_samples(pool: PoolId, queue: str, tenant: TenantId) -> str:
    """Name the list of a tenant's waiting sample requests that one worker may run, or any (ANY_WORKER)."""
    return f"{prefix(pool)}waiting:{queue}:{tenant}"


def sample_load(pool: PoolId, tenant: TenantId) -> str:
    """Name a tenant's count of sample requests (waiting, running, bytes, tokens); they go when all are 0."""
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
