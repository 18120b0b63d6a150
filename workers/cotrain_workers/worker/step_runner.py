"""Execution of a step's ops on the engine, and prefetch of the ops queued behind it. Only failing ops fail.

There are three ways, from the fastest to the safest. All ops run in one cycle. After an exception, each run
executes alone. A step that crashed at least MAX_CRASHES times runs in ever smaller groups (bisection).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import structlog

from cotrain_store.errors import SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import OpId, RunId, request_id, run_of, seq_of
from cotrain_store.messages.ops import OpKind, QueuedOp, Step
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.engine.coordination import Yielding, run_to_end, timed
from cotrain_workers.engine.ops import CycleOutput, Failure, NoteOutput, Op, Output, Pass
from cotrain_workers.engine.training.drift import has_policy_steps
from cotrain_workers.group.engine import WorkerEngine
from cotrain_workers.op_codec import Decoded, decoding_shared_pass, engine_op
from cotrain_workers.recovery.crashes import POISON, CombinedOutputs, LargePasses, Risks, run_alone, run_in_groups
from cotrain_workers.recovery.replay import ReplayDiverged
from cotrain_workers.recovery.run_lifecycle import RunLifecycle, StepRuns
from cotrain_workers.results import StepRun

log = structlog.get_logger()

#: Time in s after the start of a step at which queued ops are read. Shorter steps have no prefetch.
LOOK_S = 0.1
#: Each further look is twice as late, up to this interval: most ops arrive soon after the results of the step before.
LONGEST_LOOK_S = 0.8
#: Maximum number of ops per run, and of bytes of all bodies.
MAX_OPS, MAX_BYTES = 8, 256 * 1024**2
#: Maximum number of runs passed to the engine: more adapters than fit on a device.
MAX_RUNS = 256
PASSES = (OpKind.FORWARD, OpKind.FORWARD_BACKWARD)


class StepRunner:
    """Executor of steps whose runs are in memory. It handles neither results nor commits."""

    def __init__(
        self,
        engine: WorkerEngine,
        execution: Execution,
        runs: RunLifecycle,
        weights: WeightsStore,
        prefetcher: Prefetcher,
    ) -> None:
        self._engine = engine
        self._prefetcher = prefetcher
        self._execution = execution
        self._runs = runs
        self._weights = weights
        self._large_passes = LargePasses(engine, execution.crash_counts, execution.worker)
        self._open_ops: dict[OpId, OpenOp] = {}
        self._risks: Risks | None = None

    def risks(self, step: Step) -> Risks:
        """Return the crashes of a step, until this process commits it."""
        if self._risks is None or self._risks.cycle != step.cycle:
            count = self._execution.crashes(step)
            self._risks = Risks(step.cycle, count, self._execution.crash_counts, self._runs.await_writes)
            if count:
                self._large_passes.read()
        return self._risks

    def is_risky(self, step: Step) -> bool:
        """Return True if a process ended during the step or one of its requests. It then runs without other work."""
        return self.risks(step).count > 0 or self._large_passes.has_kill_of(step)

    def read(self, step: Step, runs: StepRuns) -> tuple[dict[OpId, bytes], StepRuns]:
        """Return the bodies of a step's ops. A run with a missing body is stopped."""
        # A pass that is no longer open in the engine starts anew, or never runs again.
        still_open = self._engine.open_passes
        self._open_ops = {op_id: kept for op_id, kept in self._open_ops.items() if op_id in still_open}
        unread = [op for op in step.ops if op.id not in self._open_ops]
        read = dict(zip(unread, self._execution.bodies(unread), strict=True))
        bodies: dict[OpId, bytes] = {}
        stopped = dict(runs.stopped)
        for op in step.ops:
            kept = self._open_ops.get(op.id)
            body = kept.body if kept else read[op]
            if body is None and op.run not in stopped:
                missing = SpoolCorrupt("A body is gone.")
                stopped[op.run] = self._runs.stop(op.run, step.tenant_by_run[op.run], missing)
            bodies[op.id] = body or b""
        return bodies, replace(runs, stopped=stopped)

    def run(
        self,
        step: Step,
        bodies: Mapping[OpId, bytes],
        runs: StepRuns,
        is_over: Callable[[], bool],
        is_late: Callable[[], bool],
    ) -> Yielding[StepRun]:
        """Execute a step's ops. Yields after each decoded pass, and at the engine's yield points.

        If a process ended during a large pass of the step, only some ops run. The others have no output. Passes
        with an allowance may stay open. They pause when the step's time `is_over`. Once `is_late`, only one
        of them is decoded at most: a pass of many short datums takes seconds. The others wait for the next step.
        An op that runs alone or in a group has no yield points.

        Raises:
            DeviceLost: the device has failed, and the process must restart.
        """
        self._execution.begin(step)
        allowances = self._allowances(step, runs)
        requests, decode_s = yield from timed(self._requests(step, bodies, runs, allowances, is_late))
        outputs: dict[OpId, Output] = {}
        runnable: list[Op] = []
        for op_id, request in requests.items():
            if isinstance(request, Failure | NoteOutput):
                outputs[op_id] = request
            else:
                runnable.append(request)
        selected = self._large_passes.select(self._with_context(runnable, step, runs))
        if selected.killing_tokens:
            self._engine.spare_memory(selected.killing_tokens)
        if selected.is_alone:
            # Writes take memory, and a crash during one must not be attributed to the request.
            self._runs.await_writes()
        cost: CycleOutput | None = None
        ran: CycleOutput | CombinedOutputs
        if self.risks(step).is_deadly and selected.ops:
            log.error("step_crash_loop", cycle=step.cycle)
            ran = self._run_in_groups(step, selected.ops)
        else:
            failpoint("worker.before_run", (op.request_id for op in step.ops))
            cost = yield from self._run_whole(step, selected.ops, bodies, allowances, is_over)
            ran = cost or self._run_each_alone(step, selected.ops)
        outputs |= {**selected.failures, **ran.outputs}
        self._large_passes.forget([request_id(RunId(run), seq) for run, seq in outputs])
        return StepRun(
            # An op that does not run waits for an unfinished pass before it, like the others.
            finished_outputs(step.ops, outputs),
            cost,
            is_exact=runs.is_exact and ran.is_exact,
            requests=selected.ops,
            earlier_s={op_id: kept.device_s for op_id, kept in self._open_ops.items()} if cost else {},
            decode_s=decode_s,
        )

    def _allowances(self, step: Step, runs: StepRuns) -> dict[OpId, int]:
        """Return the tokens of the passes that may stay open.

        In a risky step, every pass runs to its end. A pass that crashes late would otherwise crash in a different step
        each time, and bisection counts the crashes of one step. Every pass also runs to its end if a run's restored
        bits may differ, because the commit of its next op must record that.
        """
        if self.is_risky(step) or not runs.is_exact:
            return {}
        return {(run_of(request), seq_of(request)): tokens for request, tokens in step.allowances.items()}

    def _requests(
        self,
        step: Step,
        bodies: Mapping[OpId, bytes],
        runs: StepRuns,
        allowances: Container[OpId],
        is_late: Callable[[], bool],
    ) -> Yielding[dict[OpId, Op | NoteOutput | Failure]]:
        """Return the request of each op of a step, except of those that wait for the next step."""
        requests: dict[OpId, Op | NoteOutput | Failure] = {}
        decoded: Decoded = {}
        waiting: set[RunId] = set()
        has_one = False
        for op in step.ops:
            if op.run in waiting:
                continue
            body, kept = bodies[op.id], self._open_ops.get(op.id)
            request = (
                runs.stopped.get(op.run)
                or runs.rewinds.get(op.id)
                or (kept.request if kept else self._prefetcher.take(op, body))
            )
            if request is None and op.id in allowances:
                if has_one and is_late():
                    waiting.add(op.run)
                    continue
                has_one = True
            if request is None and op.kind in PASSES:
                request = yield from decoding_shared_pass(op, body, decoded)
                yield
            requests[op.id] = request or engine_op(op, body, self._weights, self._weights.layout_of)
        return requests

    def _with_context(self, ops: Iterable[Op], step: Step, runs: StepRuns) -> list[Op]:
        """Return ops; passes with their tenant, and with the optimizer step of their run if they measure a lag."""
        lagging = {RunId(op.run) for op in ops if isinstance(op, Pass) and has_policy_steps(op)}
        steps = self._steps_before(lagging, runs) if lagging else {}
        return [
            replace(op, tenant=step.tenant_by_run[RunId(op.run)], step=steps.get(RunId(op.run), op.step))
            if isinstance(op, Pass)
            else op
            for op in ops
        ]

    def _steps_before(self, names: Collection[RunId], runs: StepRuns) -> dict[RunId, int]:
        """Return the number of optimizer steps of some runs before this step."""
        # A rewind of the same step comes first, and is not committed yet.
        rewound = {
            RunId(run): note.answer["step"]
            for (run, _), note in runs.rewinds.items()
            if run in names and isinstance(note, NoteOutput)
        }
        return {**self._execution.steps_of(names), **rewound}

    def _run_whole(
        self,
        step: Step,
        ops: Sequence[Op],
        bodies: Mapping[OpId, bytes],
        allowances: Mapping[OpId, int],
        is_over: Callable[[], bool],
    ) -> Yielding[CycleOutput | None]:
        """Run ops in one cycle. Return None if the engine raised; the request that caused it is not known."""
        try:
            cost = yield from self._engine.cycle(ops, allowances, is_over)
        except Exception:  # the request that caused it then fails alone
            log.exception("cycle_failed", cycle=step.cycle)
            return None  # releases the exception, with the tensors that its frames hold
        for request in ops:
            if (op_id := (RunId(request.run), request.seq)) in cost.open_tokens:
                self._open_ops.setdefault(op_id, OpenOp(bodies[op_id], request))
        return cost

    def _run_each_alone(self, step: Step, ops: Sequence[Op]) -> CombinedOutputs:
        """Run each run's ops one by one. A request that breaks the engine fails alone."""
        self._engine.check_device()
        ran = CombinedOutputs()
        for run in dict.fromkeys(op.run for op in ops):
            ran.add(self._run_separately(step, ops, None, run))
        return ran

    def _run_in_groups(self, step: Step, ops: Sequence[Op]) -> CombinedOutputs:
        """Run a step that crashed its processes in groups, without the ops that crash."""
        risks = self.risks(step)
        side_by_side = [op for run in dict.fromkeys(op.run for op in ops) for op in ops if op.run == run]
        ran = run_in_groups(self._engine, risks, side_by_side, partial(self._run_separately, step, ops, risks))
        self._runs.uncounted["poison_ops"] += sum(each is POISON for each in ran.outputs.values())
        return ran

    def _run_separately(self, step: Step, ops: Iterable[Op], risks: Risks | None, name: str) -> CombinedOutputs:
        """Execute one run's ops one by one, from its last committed state. The op that still fails is the cause."""
        run, of_run = RunId(name), [op for op in ops if op.run == name]
        try:
            with structlog.contextvars.bound_contextvars(run=run, tenant=step.tenant_by_run[run]):
                return run_alone(self._engine, of_run, partial(self._runs.reload_state, run), risks)
        except (ReplayDiverged, SpoolCorrupt) as broken:
            failure = self._runs.stop(run, step.tenant_by_run[run], broken)
            return CombinedOutputs(dict.fromkeys((op.id for op in of_run), failure))

    def committed(self, device_s: Mapping[OpId, float]) -> None:
        """Update the computing time of each open pass after a step."""
        for op_id, kept in self._open_ops.items():
            self._open_ops[op_id] = replace(kept, device_s=device_s.get(op_id, kept.device_s))


@dataclass(frozen=True)
class OpenOp:
    """Worker's state of a pass that takes several steps; the engine has its own."""

    body: bytes
    request: Op  # decoded request, so that the body is read and decoded once
    device_s: float = 0.0
    """Compute time of its steps so far in s. It is charged to the tenant once, in the commit that resolves the pass.

    Work that a crash repeats is never charged.
    """


def finished_outputs(ops: Iterable[QueuedOp], outputs: Mapping[OpId, Output]) -> dict[OpId, Output]:
    """Return the outputs without those behind an unfinished op of their run, which has none yet."""
    unfinished: set[RunId] = set()
    finished: dict[OpId, Output] = {}
    for op in ops:
        output = outputs.get(op.id)
        if output is None:
            unfinished.add(op.run)
        elif op.run not in unfinished:
            finished[op.id] = output
    return finished


class Prefetcher:
    """Thread that reads and decodes the bodies of queued ops while the engine computes a step.

    It also collects the runs whose adapters are likely to be needed next. It decides nothing: the plan selects the next
    ops and their order. A decoded op is used only if its planned body is identical, byte for byte.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._decoded: dict[QueuedOp, tuple[bytes, Pass | Failure]] = {}
        self._ready: list[RunId] = []

    @contextmanager
    def during(self, step: Step) -> Iterator[None]:
        """Prefetch while a step runs. An error is ignored here, because it repeats when the op itself runs."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._look, args=(step, is_over), name="prefetch")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def ready_runs(self) -> list[RunId]:
        """Return the runs that were last seen ready for a plan, once."""
        found, self._ready = self._ready, []
        return found

    def take(self, op: QueuedOp, body: bytes) -> Pass | Failure | None:
        """Return the decoded request of exactly this body, once; None if there is none."""
        known = self._decoded.pop(op, None)
        return known[1] if known and known[0] == body else None

    def _look(self, step: Step, is_over: threading.Event) -> None:
        # a new thread has an empty context
        structlog.contextvars.bind_contextvars(cycle=step.cycle)
        wait_s = LOOK_S
        try:
            while not is_over.wait(wait_s):
                self._ready = self._execution.logs.ready_runs(MAX_RUNS)
                self._decode(step, is_over)
                wait_s = min(2 * wait_s, LONGEST_LOOK_S)
        except CONNECTION_LOST as lost:
            log.info("prefetch_stopped", reason=str(lost))
        except Exception:  # prefetching is best effort
            log.exception("prefetch_failed")

    def _decode(self, step: Step, is_over: threading.Event) -> None:
        queued = [op for op in self._execution.logs.waiting_after(step, MAX_OPS) if op.kind in PASSES]
        # Drop decoded ops that were abandoned, or that belong to a run of an earlier step.
        self._decoded = {op: self._decoded[op] for op in queued if op in self._decoded}
        taken = sum({_body_key(op): op.size for op in self._decoded}.values())
        known = {op.ref: each for op, each in self._decoded.items() if op.ref != "inline"}
        small = [op for op in queued if op.ref == "inline" and op not in self._decoded]
        small_bodies = dict(zip(small, self._execution.bodies(small), strict=True))
        for op in queued:
            shared = known.get(op.ref)  # runs of a sweep share bodies
            size = 0 if shared else op.size
            if op in self._decoded or taken + size > MAX_BYTES:
                continue
            if is_over.is_set():
                return
            body = shared[0] if shared else small_bodies.get(op)
            if op.ref != "inline" and not shared:
                body = self._execution.bodies([op])[0]
            if body is None:
                continue
            decoded = {op.ref: shared[1]} if shared else {}
            self._decoded[op] = body, run_to_end(decoding_shared_pass(op, body, decoded))
            taken += size
            if op.ref != "inline":
                known[op.ref] = self._decoded[op]


def _body_key(op: QueuedOp) -> str:
    return op.request_id if op.ref == "inline" else op.ref
