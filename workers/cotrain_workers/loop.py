"""The worker's loop: take a step, run it in the engine, commit it. Everything may run twice.

plan → execute → commit: the plan is the scheduler's and is fixed; what this process computed before
it died is computed again from the log.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from cotrain_store.connection import CONNECTION_LOST
from cotrain_store.dispatch import WorkerBeat
from cotrain_store.errors import Fenced, SpoolCorrupt
from cotrain_store.execution import RUN_STOPPED
from cotrain_store.messages import RunId, request_id
from cotrain_workers.cycle_record import counted_cycle, cycle_record
from cotrain_workers.ops import Failure
from cotrain_workers.recovery import ReplayDiverged
from cotrain_workers.requests import engine_op, result_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from cotrain_store.execution import Execution
    from cotrain_store.messages import Step
    from cotrain_workers.engine import Engine
    from cotrain_workers.keeper import Keeper
    from cotrain_workers.ops import CycleOutput, Op, Output

log = structlog.get_logger()

BEAT_S = 2.0
IDLE_S = 1.0
_RETRY_S = 0.2
#: Weight of the newest cycle in the measured throughput.
_SMOOTHING = 0.2
#: A cycle smaller than this measures overhead, not throughput.
_MEASURABLE_TOKENS = 512
#: How long a drain may spend on recovery copies; what is left is replayed at the next start.
DRAIN_S = 60.0
#: A step that was left open this often is run op by op, to find a request that kills its process;
#: one that so many processes died over, alone, is it. High enough for kills that come from outside.
MAX_STARTS = 2
MAX_DEATHS = 3

#: The answer to a request that breaks the engine. It must never be run again, not even by a replay.
_CRASHED = Failure("Internal error: this request could not be run.", "server")


class WorkerLoop:
    """Runs one worker's steps until told to stop, or replaced by another process (Fenced)."""

    def __init__(
        self,
        engine: Engine,
        execution: Execution,
        keeper: Keeper,
        *,
        device: str,
        tokens_per_s: float,
    ) -> None:
        self._engine = engine
        self._execution = execution
        self._keeper = keeper
        self._device = device
        self._tokens_per_s = tokens_per_s
        self._replayed_ops = 0
        self._uncounted: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._fenced = False

    def stop(self) -> None:
        """Finish the step in work, then leave."""
        self._stopping.set()

    def run(self) -> None:
        """Serve until stopped; raises Fenced when another process took this worker's place."""
        heart = threading.Thread(target=self._beat_until_stopped, name="beat", daemon=True)
        heart.start()
        while not self._stopping.is_set():
            try:
                self._turn()
            except CONNECTION_LOST:
                log.warning("redis_lost")
                self._stopping.wait(_RETRY_S)
        if self._fenced:
            raise Fenced
        heart.join()
        try:
            self._keeper.drain(DRAIN_S)
            self._execution.leave()
        except CONNECTION_LOST:
            log.warning("drain_cut_short")  # what was not copied out is replayed

    def _turn(self) -> None:
        steps = self._execution.open_steps()
        if steps:
            self.execute(steps[0])
        else:
            self._keeper.tend()
            self._execution.wait(IDLE_S)

    def execute(self, step: Step) -> None:
        """Run one step and commit it."""
        started = time.time()
        lost = self._restore_runs(step)
        # A commit is atomic, so a re-run step holds nothing committed; should it ever, then not twice.
        step = replace(step, ops=tuple(op for op in step.ops if op.seq > self._keeper.done(op.run)))
        try:
            outputs, cost = self._outputs(step, lost)
            finished = time.time()
            record = self._commit(step, outputs, cost, started, finished)
        except CONNECTION_LOST:
            # Memory is ahead of the log, or not: the commit whose answer was lost may have happened.
            for run in {op.run for op in step.ops}:
                self._keeper.forget_state(run)
            raise
        self._measure(cost)
        self._keeper.committed(step, finished - started)
        log.info(
            "cycle_committed", cycle=step.cycle, runs=len(record["runs"]), ops=len(step.ops),
            tokens=record["tokens"], forwards=record["forwards"], dur_ms=record["duration_ms"],
        )  # fmt: skip

    def _commit(
        self,
        step: Step,
        outputs: Mapping[tuple[str, int], Output],
        cost: CycleOutput | None,
        started: float,
        finished: float,
    ) -> dict[str, Any]:
        """Commit a step and return its record. While Redis is away it waits: the work is done."""
        results = {
            (op.run, op.seq): result_of(op, outputs[op.run, op.seq], step.cycle) for op in step.ops
        }
        record = cycle_record(step, results, cost, started, finished)
        counted = counted_cycle(step, outputs, cost, record) | self._uncounted
        crashed = {at for at in results if outputs[at] is _CRASHED}
        while True:
            try:
                self._execution.commit(step, results, record, counted, crashed)
            except CONNECTION_LOST:
                if self._stopping.wait(_RETRY_S):
                    raise
            else:
                self._uncounted.clear()
                return record

    def _restore_runs(self, step: Step) -> dict[RunId, Failure]:
        """Have every run of the step in memory; those that cannot be restored fail alone."""
        lost: dict[RunId, Failure] = {}
        for run in dict.fromkeys(op.run for op in step.ops):
            try:
                self._restore(run)
            except (ReplayDiverged, SpoolCorrupt) as broken:
                lost[run] = self._fail_run(run, step, broken)
        return lost

    def _restore(self, run: RunId) -> None:
        replayed = self._keeper.ensure(run)
        self._replayed_ops += replayed
        self._uncounted["replayed_ops"] += replayed

    def _fail_run(self, run: RunId, step: Step, broken: ReplayDiverged | SpoolCorrupt) -> Failure:
        log.error("run_failed", run=run, reason=str(broken))
        self._uncounted["diverged_runs"] += isinstance(broken, ReplayDiverged)
        self._execution.fail_run(run, step.tenant_by_run[run])
        self._keeper.forget_state(run)
        return Failure(RUN_STOPPED.json()["error"], "server")

    def _outputs(
        self, step: Step, lost: dict[RunId, Failure]
    ) -> tuple[dict[tuple[str, int], Output], CycleOutput | None]:
        outputs: dict[tuple[str, int], Output] = {}
        runnable: list[Op] = []
        bodies = self._execution.bodies(step.ops)
        gone = {op.run for op, body in zip(step.ops, bodies, strict=True) if body is None}
        for run in gone - lost.keys():
            lost[run] = self._fail_run(run, step, SpoolCorrupt("A body is gone."))
        for op, body in zip(step.ops, bodies, strict=True):
            request = lost.get(op.run) or engine_op(op, body or b"")
            if isinstance(request, Failure):
                outputs[op.run, op.seq] = request
            else:
                runnable.append(request)
        if self._execution.starts(step) > MAX_STARTS:
            log.error("cycle_keeps_killing", cycle=step.cycle)
            return outputs | self._isolated(runnable, step, is_deadly=True), None
        try:
            cost = self._engine.run(runnable)
        except Exception:  # the guilty request, whatever it did, is found and fails alone
            log.exception("cycle_failed", cycle=step.cycle)
            return outputs | self._isolated(runnable, step), None
        return outputs | dict(cost.outputs), cost

    def _isolated(
        self, ops: Sequence[Op], step: Step, *, is_deadly: bool = False
    ) -> dict[tuple[str, int], Output]:
        """Run each run's ops by themselves, from their last committed state; blame what still fails."""
        outputs: dict[tuple[str, int], Output] = {}
        for run in dict.fromkeys(RunId(op.run) for op in ops):
            mine = [op for op in ops if op.run == run]
            try:
                outputs |= self._run_alone(run, mine, is_deadly=is_deadly)
            except (ReplayDiverged, SpoolCorrupt) as broken:
                failure = self._fail_run(run, step, broken)
                outputs |= dict.fromkeys(((op.run, op.seq) for op in mine), failure)
        return outputs

    def _run_alone(
        self, run: RunId, ops: Sequence[Op], *, is_deadly: bool
    ) -> dict[tuple[str, int], Output]:
        """Run one run's ops again and again, each time without one more that breaks the engine."""
        deaths = self._execution.deaths() if is_deadly else {}
        crashed: dict[tuple[str, int], Output] = {
            (op.run, op.seq): _CRASHED
            for op in ops
            if deaths.get(request_id(run, op.seq), 0) >= MAX_DEATHS
        }
        while True:
            self._keeper.forget_state(run)
            self._restore(run)
            outputs: dict[tuple[str, int], Output] = {}
            left = [op for op in ops if (op.run, op.seq) not in crashed]
            guilty = self._run_one_by_one(left, outputs, is_deadly=is_deadly)
            if guilty is None:
                return outputs | crashed
            crashed[guilty.run, guilty.seq] = _CRASHED

    def _run_one_by_one(
        self, ops: Sequence[Op], outputs: dict[tuple[str, int], Output], *, is_deadly: bool
    ) -> Op | None:
        for op in ops:
            request = request_id(RunId(op.run), op.seq)
            if is_deadly:
                self._execution.risk(request)
            try:
                outputs.update(self._engine.run([op]).outputs)
            except Exception:
                log.exception("op_failed", run=op.run, seq=op.seq)
                return op
            if is_deadly:
                self._execution.survived(request)
        return None

    def _measure(self, cost: CycleOutput | None) -> None:
        if cost is None or cost.tokens < _MEASURABLE_TOKENS:
            return
        measured = cost.tokens / (cost.wave_s + cost.optim_s)
        self._tokens_per_s += _SMOOTHING * (measured - self._tokens_per_s)

    def _beat_until_stopped(self) -> None:
        while True:
            try:
                self._execution.beat(self._beat())
            except Fenced:
                self._fenced = True
                self._stopping.set()
            except CONNECTION_LOST:
                log.warning("beat_lost")
            if self._stopping.wait(BEAT_S):
                return

    def _beat(self) -> WorkerBeat:
        return WorkerBeat(
            id=self._execution.worker,
            epoch=self._execution.epoch,
            state="serving",
            device=self._device,
            tokens_per_s=self._tokens_per_s,
            runs=self._keeper.runs,
            memory_bytes=_resident_bytes(),
            seen_at=time.time(),
            restored_ops=self._replayed_ops,
        )


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123  # a kernel file, not a path to resolve
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
