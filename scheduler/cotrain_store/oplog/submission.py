"""What `submit.lua` is asked: one op of a run, what it needs, and what its tenant may have."""

from __future__ import annotations

from dataclasses import dataclass

from cotrain_store.keys import fleet_keys, result_keys, run_keys, tenant_keys
from cotrain_store.messages.ids import RunId, SamplerId, TenantId, WeightsRef
from cotrain_store.messages.runs import HISTORY_POINTS, RunRecord
from cotrain_store.tenants.run_bytes import RunWeight

#: A seq further behind the last committed one than this is a client's mistake.
MAX_SEQ_GAP = 1_024
#: A sampler that was asked within this time makes no room for another.
SAMPLER_REST_MS = 30 * 60 * 1000


@dataclass(frozen=True)
class TenantLimits:
    """What one tenant may have waiting in one pool, and how many live runs it may have."""

    ops: int = 512
    tokens: int = 8_000_000
    bytes: int = 1_000_000_000
    runs: int = 1_000
    unread_bytes: int = 2_000_000_000
    """Of results that were never fetched, in all pools."""
    samplers: int = 10_000
    """In all pools, those of saves that wait with them."""
    sampler_bytes: int = 100_000_000_000
    """Of weights that saves without a name left. Over it, samplers at rest make room for new ones."""
    run_bytes: int = 0
    """Of what live runs hold; 0: `run_bytes.default_quota`."""
    record_bytes: int = 200_000_000
    """Of records of sessions and runs, which are kept permanently."""
    history_points: int = HISTORY_POINTS
    """Of the histories of all runs, in all pools; over it, those go that were added to longest ago."""


@dataclass(frozen=True)
class SubmittedOp:
    """One op, as the log shall hold it."""

    digest: str
    size: int
    """Bytes of the body."""
    envelope: str | None = None
    """None where its body is not stored yet: then the script only says whether it would take the op."""
    segment: str | None = None
    """Of the spool, where the body is there; else it follows."""


@dataclass(frozen=True)
class Submission:
    """The argument of `submit.lua`."""

    run: RunId
    tenant: TenantId
    created_at: float
    """Of the run."""
    record: str | None
    """The run's own, by the op that makes it."""
    seq: int | None
    """The client's; None for an unnumbered op."""
    idempotency_key: str | None
    op: SubmittedOp
    save: SubmittedOp | None
    """The next op, accepted with this one or not at all."""
    tokens: int
    uses: tuple[WeightsRef, ...]
    sampler: SamplerId | None
    now_ms: int
    pool_tag: str
    limits: TenantLimits
    weighs: RunWeight | None = None
    """Of the run, by the op that makes it; None where that is not known."""
    max_seq_gap: int = MAX_SEQ_GAP
    sampler_idle_ms: int = run_keys.EPHEMERAL_SAMPLER_IDLE_MS
    sampler_rest_ms: int = SAMPLER_REST_MS


def submission_keys(run: RunRecord) -> list[str]:
    """Name the keys of `submit.lua`, in its order."""
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
