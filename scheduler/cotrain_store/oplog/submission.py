"""Arguments of `submit.lua`: one op of a run, its requirements, and the limits of its tenant."""

from dataclasses import dataclass

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RunId, SamplerId, TenantId, WeightsRef
from cotrain_store.messages.runs import HISTORY_POINTS, RunRecord
from cotrain_store.tenants.run_bytes import RunWeight

#: Maximum distance of a seq from the last committed one; a larger one is a client error.
MAX_SEQ_GAP = 1_024
#: A sampler used within this time is not evicted for another.
SAMPLER_REST_MS = 30 * 60 * 1000


@dataclass(frozen=True)
class TenantLimits:
    """Limits of one tenant on pending work in one pool, and on live runs and records."""

    ops: int = 512
    tokens: int = 8_000_000
    bytes: int = 1_000_000_000
    runs: int = 1_000
    unread_bytes: int = 2_000_000_000  # bytes of results that were never fetched, in all pools
    samplers: int = 10_000  # number of samplers in all pools, including those of pending saves
    sampler_bytes: int = 100_000_000_000
    """Bytes of weights of saves without a name. Above the limit, idle samplers are evicted for new
    ones.
    """
    run_bytes: int = 0  # bytes that live runs hold; 0 for `run_bytes.default_quota`
    record_bytes: int = 200_000_000
    """Bytes of records of sessions and runs, which are kept permanently."""
    history_points: int = HISTORY_POINTS
    """Points in the histories of all runs, in all pools. Above the limit, the least recently
    extended histories are deleted.
    """


@dataclass(frozen=True)
class SubmittedOp:
    """One op in the format of the log."""

    digest: str
    size: int  # bytes of the body
    envelope: str | None = None
    """None if its body is not stored yet. The script then only checks whether it would accept the
    op.
    """
    segment: str | None = None
    """Spool segment of the body; None if the body is an argument of the script."""


@dataclass(frozen=True)
class Submission:
    """Argument of `submit.lua`."""

    run: RunId
    tenant: TenantId
    created_at: float  # creation time of the run
    record: str | None  # record of the run, for the op that creates it
    seq: int | None  # seq of the client; None for an unnumbered op
    idempotency_key: str | None
    op: SubmittedOp
    save: SubmittedOp | None  # next op, accepted together with this one or not at all
    tokens: int
    uses: tuple[WeightsRef, ...]
    """Weights that the op needs. They must be stored, except those of a fork."""
    sampler: SamplerId | None
    now_ms: int
    pool_tag: str
    limits: TenantLimits
    weighs: RunWeight | None = None
    """Weight of the run, for the op that creates it; None if it is unknown."""
    forks: bool = False
    """True for an op that creates a run from weights that may be in the memory of one worker only."""
    max_seq_gap: int = MAX_SEQ_GAP
    sampler_idle_ms: int = redis_keys.EPHEMERAL_SAMPLER_IDLE_MS
    sampler_rest_ms: int = SAMPLER_REST_MS


def submission_keys(run: RunRecord) -> list[str]:
    """Return the keys of `submit.lua`, in its order."""
    pool, tenant = run.pool, run.tenant
    return [
        redis_keys.run(run.id), redis_keys.log(pool, run.id), redis_keys.ops(pool, run.id),
        redis_keys.bodies(pool, run.id), redis_keys.digests(pool, run.id), redis_keys.ready(pool),
        redis_keys.gaps(pool), redis_keys.queue(pool, tenant), redis_keys.queue_tenants(pool),
        redis_keys.spool_segment_refs(), redis_keys.session_runs(run.session),
        redis_keys.tenant_runs(tenant), redis_keys.notify_scheduler(),
        redis_keys.unnumbered_ops(pool, run.id), redis_keys.training_runs(tenant),
        redis_keys.all_training_runs(),
    ]  # fmt: skip
