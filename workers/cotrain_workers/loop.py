"""The worker's loop: take a step, run it in the engine, commit it. Everything may run twice.

plan → execute → commit: the plan is the scheduler's and is fixed; what this process computed before
it died is computed again from the log.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from cotrain_store.connection import CONNECTION_LOST
from cotrain_store.dispatch import WorkerBeat
from cotrain_store.errors import Fenced, SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_store.messages import OpKind, RunId
from cotrain_workers.beside import Beside
from cotrain_workers.heart import Heart, resident_bytes
from cotrain_workers.ops import Failure
from cotrain_workers.outcome import outcome_of
from cotrain_workers.recovery import ReplayDiverged
from cotrain_workers.requests import engine_op
from cotrain_workers.runs import Runs
from cotrain_workers.suspects import run_alone

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.execution import Execution
    from cotrain_store.messages import QueuedOp, Step
    from cotrain_workers.engine import Engine
    from cotrain_workers.keeper import Keeper
    from cotrain_workers.ops import CycleOutput, Op, Output
    from cotrain_workers.outcome import Outcome
    from cotrain_workers.recorder import Recorder
    from cotrain_workers.runs import Between
    from cotrain_workers.sampling_service import SamplingService
    from cotrain_workers.share import Share
    from cotrain_workers.weights_store import WeightsStore

    Place = tuple[str, int]  # a request's run and seq

log = structlog.get_logger()

IDLE_S = 1.0
#: How long to wait for a decoder that works elsewhere.
SOON_S = 0.02
#: While there is always something to decode, what is due besides is looked for this often.
TEND_S = 0.5
_RETRY_S = 0.2
#: Weight of the newest cycle in the measured throughput.
_SMOOTHING = 0.2
#: A cycle smaller than this measures overhead, not throughput.
_MEASURABLE_TOKENS = 512
#: How long a save waits for the disk, when what it has not taken yet fills the memory for it.
ROOM_WAIT_S = 10.0
#: How long a drain may spend on recovery copies; what is left is replayed at the next start.
DRAIN_S = 60.0
#: A step that was left open this often is run op by op, to find a request that kills its process.
MAX_STARTS = 2

NO_ROOM = Failure("The server's disk is full or too slow for another save; save later.", "server")


class WorkerLoop:
    """Runs one worker's steps until told to stop, or replaced by another process (Fenced).

    Sample requests are run when no step is open, and between the micro-batches of one.
    """

    def __init__(
        self,
        engine: Engine,
        execution: Execution,
        keeper: Keeper,
        weights: WeightsStore,
        sampler: SamplingService,
        share: Share,
        recorder: Recorder,
        *,
        base_model: str,
        device: str,
        tokens_per_s: float,
    ) -> None:
        self._engine = engine
        self._execution = execution
        self._keeper = keeper
        self._weights = weights
        self._runs = Runs(execution, keeper, weights)
        self._sampler = sampler
        self._recorder = recorder
        self._base_model = base_model
        self._device = device
        self._tokens_per_s = tokens_per_s
        self._stopping = threading.Event()
        self._beside = Beside(sampler, share, self._stopping)
        self._tended_at = time.monotonic()

    def stop(self) -> None:
        """Finish the step in work, then leave."""
        self._stopping.set()

    def run(self) -> None:
        """Serve until stopped; raises Fenced when another process took this worker's place."""
        heart = Heart(self._execution, self._beat, self._stopping)
        heart.start()
        while not self._stopping.is_set():
            try:
                self._turn()
            except CONNECTION_LOST:
                log.warning("redis_lost")
                self._stopping.wait(_RETRY_S)
        if heart.was_replaced:
            raise Fenced
        heart.join()
        try:
            self._drain()
        except CONNECTION_LOST:
            log.warning("drain_cut_short")  # what was not copied out is replayed

    def _drain(self) -> None:
        until = time.monotonic() + DRAIN_S
        self._sampler.drain()
        self._weights.drain(DRAIN_S)  # first: no recovery copy counts before the saves it covers
        self._keeper.drain(max(0.0, until - time.monotonic()))
        self._execution.leave()

    def _turn(self) -> None:
        for weights in self._weights.lost()[:1]:  # more of them in the next turns
            self._beside.training_begins()
            self._runs.make_again(weights, self._beside.between)
            self._beside.training_ends()
        steps = self._execution.open_steps()
        if steps:
            self.execute(steps[0])
        elif not self._beside.rest():
            self._tend()
            self._execution.wait(SOON_S if self._sampler.running else IDLE_S)
        if time.monotonic() - self._tended_at > TEND_S:
            self._tend()

    def _tend(self) -> None:
        self._sampler.forget(self._weights.tend())
        self._keeper.tend()
        self._tended_at = time.monotonic()

    def execute(self, step: Step) -> None:
        """Run one step and commit it."""
        started = time.time()
        self._beside.training_begins()
        starts = self._execution.starts(step)
        lost = self._restore_runs(step, self._between(starts))
        # A commit is atomic, so a re-run step holds nothing committed; should it ever, then not twice.
        step = replace(step, ops=tuple(op for op in step.ops if op.seq > self._keeper.done(op.run)))
        try:
            bodies = self._bodies(step, lost)
            self._recorder.begin(step, bodies)
            failpoint("worker.before_run", (op.request_id for op in step.ops))
            outputs, cost = self._outputs(step, bodies, lost, starts)
            failpoint("worker.after_run", (op.request_id for op in step.ops))
            finished = time.time()
            outcome = outcome_of(
                step, bodies, outputs, cost, (started, finished),
                self._execution.pool, self._base_model,
            )  # fmt: skip
            self._commit(step, outcome)
        except CONNECTION_LOST:
            # Memory is ahead of the log, or not: the commit whose answer was lost may have happened.
            for run in {op.run for op in step.ops}:
                self._keeper.forget_state(run)
            raise
        self._recorder.finish(step, outputs)
        self._measure(cost)
        self._keeper.committed(step, finished - started)
        self._beside.training_ends()
        record = outcome.record
        log.info(
            "cycle_committed", cycle=step.cycle, runs=len(record["runs"]), ops=len(step.ops),
            tokens=record["tokens"], forwards=record["forwards"], dur_ms=record["duration_ms"],
        )  # fmt: skip

    def _commit(self, step: Step, outcome: Outcome) -> None:
        """Commit a step. While Redis is away it waits: the work is done."""
        counted = {**outcome.counted, **self._runs.uncounted}
        failpoint("worker.before_commit", (op.request_id for op in step.ops))
        while True:
            try:
                for run in outcome.ended:
                    self._execution.close_run(run, step.tenant_by_run[run])
                self._execution.commit(
                    step, outcome.results, outcome.record, counted,
                    outcome.crashed, outcome.records, outcome.usage,
                )  # fmt: skip
            except CONNECTION_LOST:
                if self._stopping.wait(_RETRY_S):
                    raise
            else:
                break
        failpoint("worker.after_commit", (op.request_id for op in step.ops))
        self._runs.uncounted.clear()
        for save in outcome.saves.values():
            self._weights.put(save.records.weights, save.saved)

    def _between(self, starts: int) -> Between:
        """Choose what runs beside a step; nothing beside one that a dead predecessor left open.

        Else a request of either kind could be blamed for the deaths that one of the other caused.
        """
        return None if starts else self._beside.between

    def _restore_runs(self, step: Step, between: Between) -> dict[RunId, Failure]:
        """Have every run of the step in memory; those that cannot be restored fail alone."""
        lost: dict[RunId, Failure] = {}
        for run in dict.fromkeys(op.run for op in step.ops):
            failure = self._runs.ensure(run, step.tenant_by_run[run], between)
            if failure:
                lost[run] = failure
        return lost

    def _bodies(self, step: Step, lost: dict[RunId, Failure]) -> dict[Place, bytes]:
        """Read the step's bodies; a run of which one is gone joins the lost."""
        bodies: dict[Place, bytes] = {}
        for op, body in zip(step.ops, self._execution.bodies(step.ops), strict=True):
            if body is None and op.run not in lost:
                gone = SpoolCorrupt("A body is gone.")
                lost[op.run] = self._runs.stop(op.run, step.tenant_by_run[op.run], gone)
            bodies[op.run, op.seq] = body or b""
        return bodies

    def _outputs(
        self,
        step: Step,
        bodies: Mapping[Place, bytes],
        lost: Mapping[RunId, Failure],
        starts: int,
    ) -> tuple[dict[Place, Output], CycleOutput | None]:
        outputs: dict[Place, Output] = {}
        runnable: list[Op] = []
        for op in step.ops:
            request = lost.get(op.run) or self._request(op, bodies[op.run, op.seq])
            if isinstance(request, Failure):
                outputs[op.run, op.seq] = request
            else:
                runnable.append(request)
        if starts > MAX_STARTS:
            log.error("cycle_keeps_killing", cycle=step.cycle)
            return outputs | self._isolated(runnable, step, is_deadly=True), None
        try:
            cost = self._engine.run(runnable, self._between(starts))
        except Exception:  # the guilty request, whatever it did, is found and fails alone
            log.exception("cycle_failed", cycle=step.cycle)
            return outputs | self._isolated(runnable, step), None
        return outputs | dict(cost.outputs), cost

    def _request(self, op: QueuedOp, body: bytes) -> Op | Failure:
        if op.kind is OpKind.SAVE and not self._weights.make_room(ROOM_WAIT_S):
            return NO_ROOM
        return engine_op(op, body, self._weights)

    def _isolated(
        self, ops: Sequence[Op], step: Step, *, is_deadly: bool = False
    ) -> dict[Place, Output]:
        """Run each run's ops by themselves, from their last committed state; blame what still fails."""
        outputs: dict[Place, Output] = {}
        for run in dict.fromkeys(RunId(op.run) for op in ops):
            mine = [op for op in ops if op.run == run]
            start_over = partial(self._runs.start_over, run)
            try:
                outputs |= run_alone(
                    self._engine, self._execution, mine, start_over, is_deadly=is_deadly
                )
            except (ReplayDiverged, SpoolCorrupt) as broken:
                failure = self._runs.stop(run, step.tenant_by_run[run], broken)
                outputs |= dict.fromkeys(((op.run, op.seq) for op in mine), failure)
        return outputs

    def _measure(self, cost: CycleOutput | None) -> None:
        if cost is None or cost.tokens < _MEASURABLE_TOKENS:
            return
        # What sampled beside it counts: a cycle shall not last longer for that.
        measured = cost.tokens / (cost.wave_s + cost.optim_s + cost.beside_s)
        self._tokens_per_s += _SMOOTHING * (measured - self._tokens_per_s)

    def _beat(self) -> WorkerBeat:
        return WorkerBeat(
            id=self._execution.worker,
            epoch=self._execution.epoch,
            state="serving",
            device=self._device,
            tokens_per_s=self._tokens_per_s,
            runs=self._keeper.runs,
            memory_bytes=resident_bytes(),
            seen_at=time.time(),
            restored_ops=self._runs.replayed_ops,
            samples_running=self._sampler.running,
            samples_waiting=self._sampler.waiting,
        )
