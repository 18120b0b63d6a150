"""The keys of samplers and of sample requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.keys.fleet_keys import prefix

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId, RequestId, SamplerId, TenantId, WorkerId

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
