"""Scheduler of one pool: read the changes of its queue, decide, and write a step for each idle worker.

The queue is in memory (`queue.py`) and follows the changes that the scripts record in the same transaction. It is
reloaded whenever changes may have been missed. The decisions are pure functions: `placement.py` places and moves runs,
`planner.py` selects the start and the ops of a cycle.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog
from opentelemetry.context import Context
from opentelemetry.trace import Span

from cotrain_scheduler import placement, planner
from cotrain_scheduler.queue import FairQueue, PoolQueue, exclude_paused
from cotrain_store.errors import PlanOutdated
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.fleet import PlanPolicy, WorkerHeartbeat, WorkerSlot
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.messages.ops import PoolView, QueuedOp, RunQueue, Step, Wake
from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.logs import log_requests
from cotrain_store.monitoring.traces import named, nanoseconds, trace_id, traceparent_of, tracer
from cotrain_store.oplog.dispatch import MAX_OPS_PER_RUN, Dispatch
from cotrain_store.settings import ClockMode, SchedulerSettings

log = structlog.get_logger()

#: Polling interval: a wake-up can be lost, and a heartbeat wakes no scheduler.
SWEEP_S = 0.25
#: Polling interval when the pool is idle, to save processor time.
IDLE_SWEEP_S = 1.0
#: Delay after the queue changed under a plan; long enough not to spin if it keeps changing.
REPLAN_S = 0.005
#: Interval at which a metronome checks whether the host's clock was set.
CLOCK_CHECK_S = 1.0
#: A larger difference between two readings means that the clock was set, or that the host slept.
_JUMP_S = 1.0


class HostTime:
    """Wall clock of one reader."""

    def __init__(self) -> None:
        self.now = time.time()
        self._offset_s = self.now - time.monotonic()

    def read(self) -> float:
        """Update `now`; return the jump in seconds since the last reading, 0 if there was none.

        After a jump, `now` cannot be compared with earlier readings.
        """
        steady = time.monotonic()
        offset_s = time.time() - steady
        jumped_s, self._offset_s = offset_s - self._offset_s, offset_s
        self.now = steady + offset_s
        return jumped_s if abs(jumped_s) > _JUMP_S else 0.0


@dataclass
class _WorkerState:
    """State of one worker between cycles."""

    fair_queue: FairQueue = field(default_factory=FairQueue)
    policy: PlanPolicy = field(default_factory=PlanPolicy)  # policy of the last planned step
    last: planner.LastCycle = field(default_factory=planner.LastCycle)
    missed: planner.LastCycle = field(default_factory=planner.LastCycle)
    """Cycle before the last, with only the runs that were not back when the last one was planned."""
    return_s: float = 0.0  # `planner.return_time_s`
    last_tokens: int = 0  # tokens of the last planned step
    planned_at: float | None = None
    """Time when the step in progress was planned; None while the worker is idle."""

    def end_cycle(self, now: float) -> None:
        """Record the end of the last cycle, once; the worker is idle."""
        if self.planned_at is not None:
            self.last = replace(self.last, duration_s=now - self.planned_at, ended_at=now)
            self.planned_at = None

    def record_returns(self, back_at: Mapping[RunId, float], limit_s: float) -> None:
        """Record the return times of runs of the last two cycles. `back_at` has the runs that are back.

        A return time is the time from the end of a cycle to the run's next request. A run of the earlier cycle may
        have returned while the last one ran.
        """
        delays_s = [
            max(0.0, back_at[run] - cycle.ended_at)
            for cycle in (self.last, self.missed)
            for run in cycle.runs
            if run in back_at
        ]
        self.return_s = planner.return_time_s(self.return_s, delays_s, limit_s)
        self.missed = replace(self.last, runs=self.last.runs.difference(back_at))


class PoolScheduler:
    """Scheduler of one pool, while its process is the leader."""

    def __init__(
        self,
        dispatch: Dispatch,
        settings: SchedulerSettings,
        pool: PoolId,
        *,
        gather_s: float = planner.GATHER_S,
        quantum_tokens: int = planner.QUANTUM_TOKENS,
        base_model: str = "",
    ) -> None:
        """Initialise the scheduler; `base_model` is the pool's label in metrics."""
        self.pool = pool
        self._label = base_model or pool
        self._tick_duration = metrics.SCHEDULER_TICK.labels(self._label)
        self._dispatch = dispatch
        self._settings = settings
        self._is_eager = settings.clock_mode is ClockMode.EAGER
        self._limit_s = planner.cycle_limit_s(settings.clock_period_s, begins_at_once=self._is_eager)
        self._gather_s = gather_s
        self._quantum_tokens = quantum_tokens
        self._queue = PoolQueue(MAX_OPS_PER_RUN)
        self._seen = 0
        """Number of the last change in the queue."""
        self._cycle = 0
        """Number of the pool's last cycle."""
        self._must_reload = True
        """Reload the whole queue at the next tick. Not cleared by a reload already in progress."""
        self._slots: dict[WorkerId, int] = {}
        """Registered workers, each with the epoch of its last process."""
        self._free: frozenset[WorkerId] | None = None
        """Idle workers after the last tick. None before the first tick, and during a tick."""
        self._worker_states: defaultdict[WorkerId, _WorkerState] = defaultdict(_WorkerState)
        self._empty_since: placement.Absences = {}
        self._rebalancing = placement.Rebalancing(dispatch, pool)
        self._moving: frozenset[RunId] = frozenset()
        self.policy = PlanPolicy()
        """Pauses and weights set by the operator; `Scheduler` keeps them up to date."""
        self._time = HostTime()
        self._last_period = self._period_number(self._time.now)

    def reload_queue(self) -> None:
        """Reload the queue at the next tick, because changes may have been missed."""
        self._must_reload = True
        self._free = None

    @property
    def waiting_tokens(self) -> dict[WorkerId, int]:
        """Tokens waiting for each worker, as of the last tick."""
        return {worker: self._queue.waiting_tokens(worker) for worker in sorted(self._slots)}

    def _forget_times(self, now: float) -> None:
        """Reset all state that depends on elapsed time; the fair queues are kept."""
        self._last_period = self._period_number(now)
        self._empty_since = {}
        for state in self._worker_states.values():
            state.last = state.missed = planner.LastCycle()
            state.planned_at = state.planned_at and now

    def is_woken_by(self, wake: Wake) -> bool:
        """Return True if a tick may have work now. A request whose worker is busy does not count."""
        if not self._is_eager:
            return False
        if wake.is_free or self._free is None or wake.worker in self._free:
            return True
        return bool(self._free) and wake.worker not in self._slots

    async def tick_now(self) -> float:
        """Tick at the host's time; return the maximum sleep in seconds. Raises Fenced: a newer scheduler leads."""
        structlog.contextvars.bind_contextvars(pool=self.pool)  # only in this pool's task
        jumped_s = self._time.read()
        now = self._time.now
        if jumped_s:
            log.warning("time_jumped", pool=self.pool, by_s=round(jumped_s, 1))
            self._forget_times(now)
        return await self.tick(now) - now

    async def tick(self, now: float) -> float:
        """Plan all cycles that may start now; return the latest time of the next tick. Raises Fenced: a newer scheduler leads."""
        if self._is_eager:
            return await self._plan_idle_workers(now)
        number = self._period_number(now)
        next_check = min((number + 1) * self._settings.clock_period_s, now + CLOCK_CHECK_S)
        if number != self._last_period:
            if await self._plan_idle_workers(now) <= now + REPLAN_S:
                return now + REPLAN_S  # the queue changed under a plan: the period is not finished
            self._last_period = number
        return next_check

    async def _plan_idle_workers(self, now: float) -> float:
        with self._tick_duration.time():
            self._free = None  # unknown during a tick, so that runs becoming ready during it wake the scheduler again
            view = await self._read()
            if await self._release(view.slots, now):
                view = await self._read()
            serving = [
                (slot.heartbeat, slot.open_steps)
                for slot in view.slots
                if slot.heartbeat and not slot.heartbeat.is_handing_over
            ]
            workers = [worker for worker, _ in serving]
            free = [worker for worker, open_steps in serving if not open_steps]
            for worker in free:
                self._worker_states[worker.id].end_cycle(now)
            if free:
                self._queue.assign(workers, now)
                self._moving = await self._rebalancing.moving_runs(
                    view.moves, workers, self._queue.waiting_tokens, self._queue.recent, now
                )
            is_idle = 0 < len(free) == len(workers) and not view.ready
            again = now + (IDLE_SWEEP_S if is_idle else SWEEP_S)
            for worker in free:
                again = min(again, await self._plan(worker, now))
            self._free = frozenset(w.id for w in workers if self._worker_states[w.id].planned_at is None)
            return again

    async def _read(self) -> PoolView:
        """Return the state of the pool, with the queue in memory updated or reloaded.

        The workers are read before the queues, as a new worker may already have runs.
        """
        since = None if self._must_reload else self._seen
        view = await self._dispatch.view(self.pool, since, sorted(self._queue.unread))
        slots = view.slots
        if self._update_slots(slots) or view.number < self._seen or self._must_reload:
            self._must_reload = False
            self._queue.clear()
            self._queue.put(await self._dispatch.ready(self.pool))
            log.info("queue_read", pool=self.pool, runs=len(self._queue))
            view = await self._dispatch.view(self.pool, view.number)
        while True:
            self._queue.put(view.queues)
            if view.is_complete and not self._queue.unread:
                break
            view = await self._dispatch.view(self.pool, view.number, sorted(self._queue.unread))
        self._seen, self._cycle = view.number, view.cycle
        if len(self._queue) != view.ready:
            # A process of another version does not record its changes.
            log.warning("queue_differs", pool=self.pool, known=len(self._queue), ready=view.ready)
            self._must_reload = True
        return replace(view, slots=slots)

    def _update_slots(self, slots: Sequence[WorkerSlot]) -> bool:
        """Update the workers; return True if one is new, because it may have had runs before."""
        before, self._slots = self._slots, {slot.worker: slot.epoch for slot in slots}
        for worker, epoch in before.items():
            if worker not in self._slots:
                self._queue.deregister(worker)
            elif self._slots[worker] != epoch:
                self._queue.reset(worker)
        return bool(self._slots.keys() - before.keys())

    async def _release(self, slots: Sequence[WorkerSlot], now: float) -> bool:
        """Release the runs of drained workers, and of those dead for a long time, to other workers.

        Return True if a worker was removed.
        """
        self._empty_since = placement.absences(slots, self._empty_since, now)
        after_s, is_changed = self._settings.reassign_after_s, False
        for dead, successor in placement.reassignments(slots, self._empty_since, now, after_s):
            failpoint("reassign.before", dead.worker)
            if await self._dispatch.reassign(self.pool, dead, successor):
                is_changed = True
                failpoint("reassign.after", dead.worker)
                log.warning("worker_reassigned", pool=self.pool, worker=dead.worker, successor=successor)
        for slot, successor in placement.drained(slots):
            if await self._dispatch.deregister(self.pool, slot, successor):
                is_changed = True
                log.info("worker_drained", pool=self.pool, worker=slot.worker)
        return is_changed

    async def _plan(self, worker: WorkerHeartbeat, now: float) -> float:
        """Plan an idle worker's next step if it has work and may start; return the latest time of the next tick.

        If the log has changed since the queue was read, nothing is written, and the queue is read again.
        """
        state, began = self._worker_states[worker.id], time.time()
        policy = self.policy  # may change while this plan is written
        waiting = exclude_paused(self._queue.waiting(worker.id), policy.pauses, self._moving)
        if not waiting:
            return math.inf
        back_at = self._queue.back_at(worker.id, state.last.runs | state.missed.runs)

        if self._is_eager:
            are_back = state.last.runs <= back_at.keys()
            start = planner.eager_start(state.last, now, self._gather_s, state.return_s, are_back=are_back)
            if start > now:
                return start
        tokens = planner.budget(worker, self._limit_s, state.last_tokens)
        chosen = planner.select(
            waiting, state.fair_queue, tokens, self._quantum_tokens,
            accepts_saves=worker.accepts_saves, weights=policy.weights, is_current=policy == state.policy,
        )  # fmt: skip
        if not chosen.ops:
            return math.inf  # only saves are waiting, which the worker does not accept now

        try:
            await self._write_step(worker.id, chosen, now, began)
        except PlanOutdated:
            self._queue.unread |= chosen.queues.keys()
            return now + REPLAN_S
        state.record_returns(back_at, self._limit_s)
        state.fair_queue, state.policy, state.planned_at = chosen.fair_queue, policy, now
        state.last, state.last_tokens = planner.LastCycle(frozenset(chosen.queues)), chosen.tokens
        return math.inf

    async def _write_step(self, worker: WorkerId, chosen: planner.Selection, now: float, began: float) -> None:
        """Write the step of a plan that started at `began`, and remove its ops from the queue. Raises PlanOutdated."""
        tenants = {run: queue.tenant for run, queue in chosen.queues.items()}
        span = _begin_plan(chosen.ops, began)
        trace = traceparent_of(span) if span else ""
        step = Step(self._cycle + 1, worker, chosen.ops, now, tenants, chosen.allowances, self._limit_s, trace)
        requests = step.requests
        failpoint("scheduler.before_plan", requests)
        await self._dispatch.plan(self.pool, step, 0 if self._must_reload else self._seen)
        failpoint("scheduler.after_plan", requests)
        self._cycle = step.cycle
        self._count(chosen.ops, chosen.queues, now)
        self._queue.remove_planned(chosen.ops, worker, now)
        if span:
            _end_plan(span, self.pool, step)
        log_requests(
            log.debug, "cycle_planned", requests, cycle=step.cycle,
            pool=self.pool, worker=worker, runs=len(chosen.queues), ops=len(chosen.ops),
            tokens=chosen.tokens, **({"trace_id": trace_id(trace)} if trace else {}),
        )  # fmt: skip

    def _count(self, ops: Sequence[QueuedOp], queues: Mapping[RunId, RunQueue], now: float) -> None:
        """Record the waiting times until now; a pass that continues is counted only once."""
        for op in ops:
            queue = queues[op.run]
            if not (queue.done_tokens and op.seq == queue.ops[0].seq):
                waited_s = max(0.0, now - op.accepted_at)
                metrics.OP_WAIT.labels(self._label, op.kind.value).observe(waited_s)

    def _period_number(self, now: float) -> int:
        return planner.period_number(now, self._settings.clock_period_s)


def _begin_plan(ops: Sequence[QueuedOp], began: float) -> Span | None:
    """Start the span of a plan that started at `began`. Without `_end_plan` nothing is reported."""
    traces = tracer()
    if traces is None or not any(op.trace for op in ops):
        return None
    return traces.start_span("plan", Context(), start_time=nanoseconds(began))


def _end_plan(span: Span, pool: PoolId, step: Step) -> None:
    """Report the plan of a committed step."""
    facts = named(
        pool=pool, worker=step.worker, cycle=step.cycle, runs=len(step.tenant_by_run),
        ops=len(step.ops), tokens=sum(op.tokens for op in step.ops),
    )  # fmt: skip
    span.set_attributes(facts)
    span.end()
