"""Cause for which a run waits, in one sentence: a pure function of the state that `/status` shows."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cotrain.wire.rest import WaitCause, WaitReason
from cotrain_server.services import Services
from cotrain_store import redis_keys
from cotrain_store.messages.fleet import WEIGHT, Pauses, WorkerHeartbeat, restoring_text
from cotrain_store.messages.ids import RequestId, RunId, TenantId, WorkerId
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.messages.runs import RunRecord, RunState
from cotrain_store.monitoring.failures import TenantFailures, recent_failures
from cotrain_store.monitoring.fleet import PoolStatus, WorkerStatus, read_fleet
from cotrain_store.tenants.policies import read_policy
from cotrain_store.tenants.run_list import RunPosition

#: A refusal within this time explains why a run has no request.
REFUSED_S = 60.0
#: A pass is large if it is at least this share of the tokens of its cycle, and has as many tokens.
LARGE_SHARE, LARGE_TOKENS = 0.5, 2_048


Found = tuple[WaitCause, str]


@dataclass(frozen=True)
class WaitState:
    """State of one run and of its pool at a moment."""

    run: RunRecord
    position: RunPosition
    now: float  # in s since the epoch
    pauses: Pauses = field(default_factory=Pauses)
    pool: PoolStatus | None = None  # None: no worker ever served the base model
    has_scheduler: bool = True
    weights: Mapping[TenantId, float] | None = None
    next_op: QueuedOp | None = None  # the first request that is not planned
    steps: tuple[Step, ...] = ()  # cycles in progress on its worker, or on any if it has none
    refused: TenantFailures | None = None  # recent refusals of its tenant
    missing: str = ""  # sentence about a missing seq_id
    shows_exits: bool = False  # True for the operator: reasons of exits may name files of the host


def why(state: WaitState) -> WaitReason:
    """Return the true cause for which a run waits, the most severe one first."""
    cause, text = _own_cause(state) or _other_work(state) or _share(state)
    return WaitReason(training_run_id=state.run.id, cause=cause, reason=text)


def brief_why(state: WaitState) -> Found:
    """Return the cause without the other work of the pool, which a state of a list does not have."""
    count = _count(state.position.accepted - state.position.done, "request")
    return _own_cause(state) or ("cycle", f"It waits with {count} for a cycle.")


def _own_cause(state: WaitState) -> Found | None:
    """Return the cause if it is the run itself, its tenant or its worker."""
    found = _end(state.run) or _idle(state) or _paused(state) or _unserved(state)
    if found is None and state.position.planned > state.position.done:
        found = _running(state)
    return found or _gap(state)


def _end(run: RunRecord) -> Found | None:
    if run.state is RunState.CLOSED:
        return "ended", "The run has ended, so nothing of it waits."
    if run.state is RunState.FAILED:
        return "failed", "The server stopped the run: a replay after a crash gave other numbers."
    return None


def _idle(state: WaitState) -> Found | None:
    if state.position.accepted > state.position.done:
        return None
    refused = state.refused
    is_repeated = refused is not None and refused.status in (429, 503)  # a client sends these again
    if refused and is_repeated and state.now - refused.at < REFUSED_S:
        since = _duration(state.now - refused.at)
        return ("quota", f"The server refused a request of this tenant {since} ago: {refused.message}")
    last = state.run.last_request_at
    since = f" The last one came {_duration(state.now - last)} ago." if last else ""
    return "idle", f"All its requests are done. It waits for the next one of its client.{since}"


def _paused(state: WaitState) -> Found | None:
    notice = state.pauses.notice(state.run.tenant, state.run.id)
    return ("paused", f"{notice[0].upper()}{notice[1:]}.") if notice else None


def _unserved(state: WaitState) -> Found | None:
    """Return the cause if no process can plan or compute its requests."""
    if not state.has_scheduler:
        return "no_scheduler", "No scheduler is running, so no worker receives a cycle."
    name = state.run.base_model
    if state.pool is None or not state.pool.workers_known:
        return "no_worker", f"No worker serves its base model {name}."
    own = [each for each in state.pool.ids if each.id == state.position.worker]
    known = own or [each for each in state.pool.ids if each.is_known]
    alive = [each.heartbeat for each in known if each.heartbeat]
    if not alive:
        return _without_process(known, name, shows_exits=state.shows_exits)
    progress = restoring_text(alive[0].restoring)
    if all(each.restoring for each in alive):
        return "restoring", f"Its worker restores runs after a start: {progress} are done."
    if all(each.is_handing_over for each in alive):
        return "draining", "Its worker is draining, and the run moves to another one."
    return None


def _without_process(known: list[WorkerStatus], base_model: str, *, shows_exits: bool) -> Found:
    last = next((each.last_exit for each in known if each.last_exit), None)
    if last is None:
        return "no_worker", f"No worker serves its base model {base_model} at the moment."
    reason = f" The last reason: {last.reason}." if shows_exits else ""
    return "restarting", f"Its worker is down, and restarted {_count(last.count, 'time')}.{reason}"


def _running(state: WaitState) -> Found:
    position = state.position
    count = _count(position.planned - position.done, "request")
    step = next((s for s in state.steps if state.run.id in s.tenant_by_run), None)
    if step is None:
        return "running", f"The current cycle computes {count} of it."
    whole = sum(op.tokens for op in step.ops if op.run == state.run.id)
    part = [step.allowances[RequestId(op.request_id)] for op in step.ops
            if op.run == state.run.id and op.request_id in step.allowances]  # fmt: skip
    if part:
        return (
            "large_pass",
            f"Its own pass has {whole:,} tokens, more than the tenant's share of a cycle, so cycle {step.cycle} "
            f"computes about {sum(part):,} of them and later cycles the others.",
        )
    runs = _count(len(step.tenant_by_run), "run")
    return ("running", f"Cycle {step.cycle} computes {count} of it, with {whole:,} tokens among those of {runs}.")


def _gap(state: WaitState) -> Found | None:
    position = state.position
    if position.gap_since_ms is None or position.ready_since_ms is not None:
        return None
    return "gap", state.missing or f"Request {position.planned + 1} of it is missing."


def _other_work(state: WaitState) -> Found | None:
    """Return the cause if its worker computes something else, or cannot store a save."""
    heartbeats = {each.id: each for each in state.pool.workers} if state.pool else {}
    worker: WorkerHeartbeat | None = heartbeats.get(WorkerId(state.position.worker))
    if state.next_op and state.next_op.kind is OpKind.SAVE and worker and not worker.accepts_saves:
        return "disk", "Its save waits until its worker has written earlier saves to disk."
    for step in state.steps:
        total = sum(op.tokens for op in step.ops)
        largest = max(step.ops, key=lambda op: op.tokens, default=None)
        if largest and largest.tokens >= max(LARGE_TOKENS, LARGE_SHARE * total):
            owner = step.tenant_by_run.get(largest.run)
            whose = f"run {largest.run}" if owner == state.run.tenant else "another tenant"
            since = _duration(state.now - step.planned_at)
            return (
                "large_pass",
                f"A pass of {largest.tokens:,} tokens of {whose} is ahead, in a cycle that began {since} ago.",
            )
    return None


def _share(state: WaitState) -> Found:
    """Return the cause of a run that is ready: the other work, the current cycle, or the gather window."""
    queues = {each.tenant: each for each in state.pool.queues} if state.pool else {}
    own = queues.get(state.run.tenant)
    others = [each for name, each in queues.items()
              if name != state.run.tenant and each.tokens and name not in state.pauses.tenants]  # fmt: skip
    if not state.steps:
        return (
            "gather",
            "It is in the next cycle. That starts after the gather window, or in metronome mode at the next period.",
        )
    if others:
        weights = state.weights or {}
        mine = weights.get(state.run.tenant, WEIGHT)
        share = mine / (mine + sum(weights.get(each.tenant, WEIGHT) for each in others))
        waiting = own.tokens if own else 0
        return (
            "share",
            f"It waits for its turn: {_count(len(others), 'other tenant')} with work, so this tenant gets about "
            f"{share:.0%} of the tokens, and has {waiting:,} tokens queued.",
        )
    count = _count(state.position.accepted - state.position.done, "request")
    return "cycle", f"It waits with {count} for the end of the current cycle, which has other runs."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(duration_s: float) -> str:
    duration_s = max(0.0, duration_s)
    if duration_s < 120:
        return f"{duration_s:.0f} s"
    return f"{duration_s / 60:.0f} min" if duration_s < 7200 else f"{duration_s / 3600:,.0f} h"


async def read_why(
    services: Services, run: RunRecord, position: RunPosition, *, shows_exits: bool = False
) -> WaitReason:
    """Return the cause for which a run at this position waits. Read the state of its pool."""
    now, connection = time.time(), services.connection
    fleet = await read_fleet(connection)
    pool = next((each for each in fleet.pools if each.record.id == run.pool), None)
    known = [each.id for each in pool.ids] if pool else []
    workers = [each for each in known if each == position.worker] or known
    pipeline = connection.pipeline(transaction=False)
    for worker in workers:
        pipeline.hvals(redis_keys.open_steps(run.pool, worker))
    pipeline.hget(redis_keys.ops(run.pool, run.id), str(position.planned + 1))
    *rows, envelope = await pipeline.execute()
    policy = await read_policy(connection)
    return why(
        WaitState(
            run=run, position=position, now=now, pauses=policy.pauses, pool=pool,
            has_scheduler=fleet.has_scheduler, weights=policy.weights,
            next_op=_op(run.id, position.planned + 1, envelope),
            steps=tuple(Step.parse(text) for row in rows for text in row),
            refused=(await recent_failures(connection, now)).get(run.tenant),
            missing=_sentence(await services.futures.reasons.gap_notice(run.pool, run.id)),
            shows_exits=shows_exits,
        )
    )  # fmt: skip


def _op(run: RunId, seq: int, envelope: bytes | None) -> QueuedOp | None:
    return QueuedOp.parse(run, seq, envelope.decode()) if envelope else None


def _sentence(notice: str | None) -> str:
    return f"{notice[0].upper()}{notice[1:]}." if notice else ""
