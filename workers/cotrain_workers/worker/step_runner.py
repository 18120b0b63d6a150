"""Give a step's ops to the engine; whatever they do to it, each gets its answer, and only the guilty fail.

Three ways, from the fastest to the surest: all at once; after an exception, each run by itself; and a
step over which processes died, in ever smaller parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import structlog

from cotrain_store.errors import SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId
from cotrain_workers.engine.ops import Failure
from cotrain_workers.op_codec import engine_op
from cotrain_workers.recovery.bisection import MAX_CRASHES, POISON, Risks, run_alone, run_in_groups
from cotrain_workers.recovery.replay import ReplayDiverged

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.messages.ops import Step
    from cotrain_store.oplog.execution import Execution
    from cotrain_workers.checkpoints.weights_store import WeightsStore
    from cotrain_workers.engine.cycle import Yielding
    from cotrain_workers.engine.engine import Engine
    from cotrain_workers.engine.ops import CycleOutput, Op, Output
    from cotrain_workers.recovery.run_lifecycle import Runs
    from cotrain_workers.worker.prefetch import Prefetcher

    Place = tuple[str, int]  # a request's run and seq
    Outputs = dict[Place, Output]

log = structlog.get_logger()


@dataclass
class Suspicion:
    """What is held against a step, for as long as this process tries to commit it."""

    cycle: int
    deaths: int
    """How many processes died with it open."""
    _execution: Execution
    _runs: Runs

    @cached_property
    def risks(self) -> Risks:
        """What may kill, noted in the store."""
        return Risks(self._execution, self._runs.await_writes)

    @property
    def is_deadly(self) -> bool:
        """Tell whether so many died that it cannot be chance any more."""
        return self.deaths >= MAX_CRASHES


class StepRunner:
    """Runs steps of runs that are in memory. Knows no results and no commits."""

    def __init__(
        self,
        engine: Engine,
        execution: Execution,
        runs: Runs,
        weights: WeightsStore,
        prefetcher: Prefetcher,
    ) -> None:
        self._engine = engine
        self._prefetcher = prefetcher
        self._execution = execution
        self._runs = runs
        self._weights = weights
        self._suspicion: Suspicion | None = None

    def suspicion(self, step: Step) -> Suspicion:
        """Look up what is held against a step; a start counts once for each process."""
        if self._suspicion is None or self._suspicion.cycle != step.cycle:
            starts = self._execution.starts(step)
            self._suspicion = Suspicion(step.cycle, starts, self._execution, self._runs)
        return self._suspicion

    def bodies(self, step: Step, lost: dict[RunId, Failure]) -> dict[Place, bytes]:
        """Read the step's bodies; a run of which one is gone joins the lost."""
        bodies: dict[Place, bytes] = {}
        for op, body in zip(step.ops, self._execution.bodies(step.ops), strict=True):
            if body is None and op.run not in lost:
                gone = SpoolCorrupt("A body is gone.")
                lost[op.run] = self._runs.stop(op.run, step.tenant_by_run[op.run], gone)
            bodies[op.run, op.seq] = body or b""
        return bodies

    def run(
        self,
        step: Step,
        bodies: Mapping[Place, bytes],
        lost: Mapping[RunId, Failure],
    ) -> Yielding[tuple[Outputs, CycleOutput | None]]:
        """Return an answer to each op, and what the step cost; None where it ran in parts.

        Yields after each micro-batch, as long as the step runs as a whole.

        Raises:
            DeviceLost: this process cannot compute any more.
        """
        outputs: Outputs = {}
        runnable: list[Op] = []
        for op in step.ops:
            body = bodies[op.run, op.seq]
            request = (
                lost.get(op.run)
                or self._prefetcher.take(op, body)
                or engine_op(op, body, self._weights)
            )
            if isinstance(request, Failure):
                outputs[op.run, op.seq] = request
            else:
                runnable.append(request)
        if self.suspicion(step).is_deadly and runnable:
            log.error("cycle_keeps_killing", cycle=step.cycle)
            return outputs | self._in_parts(runnable, step), None
        failpoint("worker.before_run", (op.request_id for op in step.ops))
        try:
            cost = yield from self._engine.cycle(runnable)
        except Exception:  # the guilty request, whatever it did, is found and fails alone
            log.exception("cycle_failed", cycle=step.cycle)
        else:
            return outputs | dict(cost.outputs), cost
        self._engine.check_device()
        # Here the exception is gone, and with it what its frames held.
        for run in dict.fromkeys(op.run for op in runnable):
            outputs |= self._by_itself(runnable, step, None, run)
        return outputs, None

    def _in_parts(self, ops: Sequence[Op], step: Step) -> Outputs:
        risks = self.suspicion(step).risks
        side_by_side = [
            op for run in dict.fromkeys(op.run for op in ops) for op in ops if op.run == run
        ]
        by_itself = partial(self._by_itself, ops, step, risks)
        outputs = run_in_groups(self._engine, risks, side_by_side, by_itself)
        self._runs.uncounted["poison_ops"] += sum(each is POISON for each in outputs.values())
        return outputs

    def _by_itself(self, ops: Sequence[Op], step: Step, risks: Risks | None, name: str) -> Outputs:
        """Run one run's ops one by one, from its last committed state; blame what still fails."""
        run, mine = RunId(name), [op for op in ops if op.run == name]
        try:
            return run_alone(self._engine, mine, partial(self._runs.start_over, run), risks)
        except (ReplayDiverged, SpoolCorrupt) as broken:
            failure = self._runs.stop(run, step.tenant_by_run[run], broken)
            return dict.fromkeys(((op.run, op.seq) for op in mine), failure)
