"""Arguments of `submit.lua`: one op of a run, its requirements, and the limits of its tenant."""

from dataclasses import dataclass

from cotrain_store.keys import fleet_keys, result_keys, run_keys, tenant_keys
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
    sampler_idle_ms: int = run_keys.EPHEMERAL_SAMPLER_IDLE_MS
    sampler_rest_ms: int = SAMPLER_REST_MS


def submission_keys(run: RunRecord) -> list[str]:
    """Return the keys of `submit.lua`, in its order."""
    pool, tenant = run.pool, run.tenant
    return [
        run_keys.run(run.id), run_keys.log(pool, run.id), run_keys.ops(pool, run.id),
        run_keys.bodies(pool, run.id), run_keys.digests(pool, run.id), run_keys.ready(pool),
        run_keys.gaps(pool), run_keys.queue(pool, tenant), run_keys.queue_tenants(pool),
        result_keys.spool_segment_refs(), tenant_keys.session_runs(run.session),
        tenant_keys.tenant_runs(tenant), fleet_keys.notify_scheduler(),
        run_keys.unnumbered_ops(pool, run.id), tenant_keys.training_runs(tenant),
        tenant_keys.all_training_runs(),
    ]  # fmt: skip
