"""Main loop of a worker: fetch a step, execute it, commit it.

The scheduler writes the plan, and the worker never changes it. Every operation is idempotent:
after a crash, the next process re-executes the open step from the log.

`WorkerLoop.execute` is one step from begin to end:

1. load its runs into memory (`recovery/run_lifecycle.py`)
2. read and decode its bodies, and run its ops on the engine (`step_runner.py`, `op_codec.py`)
3. make results, records and counters of the outputs (`results.py`)
4. write these in one commit (`Execution.commit`), then log it and start due recovery copies
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial

import structlog

from cotrain_store.errors import Fenced
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.fleet import WorkerHeartbeat, restoring_text
from cotrain_store.messages.ids import OpId, RunId
from cotrain_store.messages.ops import Step
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.monitoring.metrics import WorkerMetrics
from cotrain_store.monitoring.traces import tracer
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import CONNECTION_LOST
from cotrain_store.settings import WorkerSettings
from cotrain_workers.checkpoints.weights_store import SaveBackpressure, WeightsStore
from cotrain_workers.engine.coordination import T, Yielding, drive
from cotrain_workers.engine.device import is_out_of_memory
from cotrain_workers.group.engine import WorkerEngine
from cotrain_workers.recorder.recorder import Recorder
from cotrain_workers.recovery.run_lifecycle import RestoreStopped, RunLifecycle, StepRuns
from cotrain_workers.results import StepCommit, StepRun, commit_of
from cotrain_workers.sampling.service import SamplingService
from cotrain_workers.worker.cycle_log import bound_to_cycle, count_cycle, log_cycle, trace_cycle
from cotrain_workers.worker.device_time import CycleTimes, DeviceTime, Duty, Phase, Share, Throughput, TimeSharing
from cotrain_workers.worker.membership import Drain, Heartbeat, move_runs
from cotrain_workers.worker.self_check import SelfCheck
from cotrain_workers.worker.step_runner import Prefetcher, StepRunner

log = structlog.get_logger()

#: Wait in s between polls when there is no work.
IDLE_S = 1.0
#: Wait in s while a remote decoder is busy.
SOON_S = 0.02
#: Maintenance interval in s while the decoder is busy.
MAINTAIN_S = 0.5
_RETRY_S = 0.2
#: Share of a step's time in which passes that may wait are decoded. Plans count tokens, and a datum takes time, too.
DECODE_SHARE = 0.25
#: Part in s of the termination grace period that a drain leaves unused.
MARGIN_S = 10.0
#: Transient errors: Redis is unavailable or the disk is full. The worker waits and retries.
PAUSES = (*CONNECTION_LOST, OSError)


class WorkerLoop:
    """Execution of one worker's steps until it is stopped, or fenced by a newer process.

    Sample requests are decoded while no step is open and between the micro-batches of a step.
    """

    def __init__(
        self,
        engine: WorkerEngine,
        execution: Execution,
        runs: RunLifecycle,
        weights: WeightsStore,
        sampler: SamplingService,
        recorder: Recorder,
        record: PoolRecord,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
    ) -> None:
        self._engine = engine
        self._execution = execution
        self._runs = runs
        self._weights = weights
        self._prefetcher = Prefetcher(execution)
        self._runner = StepRunner(engine, execution, runs, weights, self._prefetcher)
        self._sampler = sampler
        self._recorder = recorder
        self._record = record
        self._metrics = metrics
        self._throughput = Throughput(record.tokens_per_s)
        self._grace_s = settings.stop_grace_s
        self._drain_until = math.inf
        self._restores_until = -math.inf
        """Monotonic time in s at which a stopping process ends a restore in progress."""
        self._stopping = threading.Event()
        self._device_time = DeviceTime()
        self._time_sharing = TimeSharing(sampler, Share(settings.sampling_share), self._stopping, self._device_time)
        self._maintained_at = -math.inf
        self._drain = Drain(execution.drain, runs, weights, sampler)
        self._move_runs = partial(move_runs, execution, runs)
        self._self_check = SelfCheck(engine, execution, sampler.probe)
        self._outside = copy_context()
        self._backpressure = SaveBackpressure(weights, lambda: self._heartbeat.send())
        self._duty = Duty()
        self._heartbeat = Heartbeat(execution, self._describe, self._stopping)

    def stop(self) -> None:
        """Finish the current step, then drain and exit."""
        self._drain_until = min(self._drain_until, time.monotonic() + self._grace_s - MARGIN_S)
        self._stopping.set()

    def run(self) -> None:
        """Serve until stopped.

        Raises:
            Fenced: a newer process has taken over this worker id.
            DeviceLost: the device has failed, and the process must restart.
        """
        self._heartbeat.start()
        try:
            self._serve_and_drain()
        finally:
            self._heartbeat.end()

    def _serve_and_drain(self) -> None:
        while not self._stopping.is_set():
            try:
                self._tick()
            except RestoreStopped as stopped:
                log.info("restore_stopped", progress=str(stopped))
            except PAUSES as pause:
                log.warning("worker_paused", reason=str(pause))
                self._stopping.wait(_RETRY_S)
            # most likely raised by the decoder: errors of a step are handled in the runner
            except RuntimeError:
                self._engine.check_device()
                raise
        if self._heartbeat.was_replaced:
            raise Fenced
        try:
            self._drain_and_leave()
        except PAUSES as pause:
            # remaining runs are replayed by the next process
            log.warning("drain_timed_out", reason=str(pause))
        self._device_time.lap(Phase.IDLE)

    def _tick(self) -> None:
        for weights in self._weights.lost()[:1]:  # the others in later ticks
            with self._time_sharing.training():
                self._run_restore(self._runs.recreate_lost_weights(weights), self._time_sharing.yield_to_decoder)
        steps = self._execution.open_steps()
        if steps and self._backpressure.admits(steps[0]):
            # Copy the adapters to the device while the bodies are read.
            self._prefetch([op.run for op in steps[0].ops])
            with bound_to_cycle(steps[0]):
                self.execute(steps[0])
        elif not self._time_sharing.decode_while_idle():
            self._maintain()
            self._execution.wait(SOON_S if steps or self._sampler.running else IDLE_S)
        if time.monotonic() - self._maintained_at > MAINTAIN_S:
            self._maintain()

    def execute(self, step: Step) -> None:
        """Execute and commit one step. It may be an open step of a crashed predecessor."""
        times = CycleTimes(self._device_time)
        self._time_sharing.training_begins()
        # At the yield points of a step that crashed a process, run nothing. Otherwise a training
        # request could be blamed for the crash of a sample request, or the reverse.
        at_yield = _nothing if self._runner.is_risky(step) else self._at_yield_point
        runs = self._run_restore(self._runs.restore(step), at_yield)
        times.note("restore", Phase.TRAIN)
        if runs is None:
            return  # planned ops of a run are void; the step is fetched again
        step = replace(step, ops=runs.ops, worker=self._execution.worker)
        try:
            bodies, runs = self._runner.read(step, runs)
            self._recorder.begin(step, bodies)
            times.note("read_bodies")
            ran = self._run_ops(step, bodies, runs, at_yield, times)
            commit = commit_of(step, bodies, ran, times.of_step(), self._record)
            self._commit(step, commit)
            times.note("commit")
        except PAUSES:
            # The commit may or may not have reached Redis, so the state in memory may be ahead of
            # the log. Reload it.
            for run in {op.run for op in step.ops}:
                self._runs.forget_state(run)
            raise
        self._note_committed(step, ran, commit, times)

    def _run_ops(
        self,
        step: Step,
        bodies: Mapping[OpId, bytes],
        runs: StepRuns,
        at_yield: Callable[[], None],
        times: CycleTimes,
    ) -> StepRun:
        """Run a step's ops on the engine, and other work at its yield points."""
        is_over = partial(self._deadline_passed, times.began_s + step.limit_s)
        is_late = partial(self._deadline_passed, time.monotonic() + DECODE_SHARE * step.limit_s)
        # Do not prefetch while re-running a step that crashed a worker, so that bisection stays unambiguous.
        with nullcontext() if self._runner.is_risky(step) else self._prefetcher.during(step):
            work = self._runner.run(step, bodies, runs, is_over, is_late)
            ran, times.sampling_s = drive(work, times.visited(at_yield))
        self._device_time.optimized(ran.cost.optim_s if ran.cost else 0.0)
        times.note("run", Phase.TRAIN)
        failpoint("worker.after_run", (op.request_id for op in step.ops))
        return ran

    def _note_committed(self, step: Step, ran: StepRun, commit: StepCommit, times: CycleTimes) -> None:
        """Count and log a committed step, and copy out the runs that are due."""
        if ran.cost:
            # Include sampling and decoding, because they count towards the duration of the cycle.
            seconds = ran.decode_s + ran.cost.wave_s + ran.cost.optim_s + times.sampling_s
            self._throughput.measure(ran.cost.forwards, ran.cost.tokens, seconds)
        self._recorder.finish(step, ran.outputs)
        count_cycle(self._metrics, step, commit)
        self._runner.committed(commit.device_s)
        self._runs.copies.committed(step, commit.results, commit.device_s)
        self._time_sharing.training_ends()
        log_cycle(step, commit, self._execution.tenant_names)
        if traces := tracer():
            trace_cycle(traces, step, ran.cost, commit, times, self._runner.risks(step).count)

    def _run_restore(self, work: Yielding[T], at_yield: Callable[[], None]) -> T:
        """Run a restore to its end. Raise RestoreStopped if this process must end; its successor continues."""

        def at_micro_batch() -> None:
            if self._stopping.is_set() and time.monotonic() > self._restores_until:
                raise RestoreStopped(restoring_text(self._runs.progress.now))
            self._runs.copies.copy_due()
            at_yield()

        return drive(work, at_micro_batch)[0]

    def _commit(self, step: Step, commit: StepCommit) -> None:
        """Commit a step. Retry while Redis is unavailable or the disk is full: the results are already computed."""
        counted = {**commit.counted, **self._runs.uncounted}
        records = {at: save.records for at, save in commit.saves.items()}
        failpoint("worker.before_commit", (op.request_id for op in step.ops))
        while True:
            try:
                if commit.saves:
                    self._backpressure.publish(save.saved for save in commit.saves.values())
                for run in commit.ended:
                    self._execution.close_run(run, step.tenant_by_run[run])
                self._execution.commit(
                    step, commit.results, commit.record, counted,
                    commit.crashed, records, commit.usage,
                    opened=commit.opened, found=commit.history, is_exact=commit.is_exact,
                )  # fmt: skip
            except PAUSES as pause:
                log.warning("commit_retrying", cycle=step.cycle, reason=str(pause))
                if self._stopping.wait(_RETRY_S):
                    raise
            else:
                break
        failpoint("worker.after_commit", (op.request_id for op in step.ops))
        self._runs.uncounted.clear()
        for save in commit.saves.values():
            accepted_at = save.accepted_at if save.is_named else None
            self._weights.put(save.records.weights, save.saved, accepted_at)

    def _deadline_passed(self, ends_at: float) -> bool:
        """Return True if open passes must stop: the step is out of time or the worker is stopping."""
        return time.monotonic() > ends_at or self._stopping.is_set()

    def _at_yield_point(self) -> None:
        """Use a yield point between two micro-batches: prefetch adapters of ready runs, then decode samples."""
        waiting = self._prefetcher.ready_runs()
        if waiting:
            self._prefetch(waiting)
        # Log lines of the decoder must not carry the cycle's context.
        self._outside.run(self._time_sharing.yield_to_decoder)

    def _prefetch(self, runs: list[RunId]) -> None:
        try:
            self._engine.adapters.prefetch(runs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            log.warning("prefetch_without_memory")

    def _maintain(self) -> None:
        self._sampler.forget(self._weights.maintain())
        self._backpressure.publish()
        self._runs.maintain()
        self._drain.hand_over_runs()
        self._move_runs()
        if self._self_check.run_if_requested(self._run_self_check):
            self._heartbeat.send()
        self._maintained_at = time.monotonic()

    def _run_self_check(self, work: Yielding[T]) -> T:
        with self._time_sharing.training():
            return drive(work, self._time_sharing.yield_to_decoder)[0]

    def _drain_and_leave(self) -> None:
        self._drain.leaves = True
        self._heartbeat.send()  # the scheduler stops planning for this worker
        self._restores_until = self._drain_until
        try:
            if self._execution.drain.has_successor():
                for step in self._execution.open_steps():
                    self.execute(step)  # runs of an open step could not be handed over
        except RestoreStopped as stopped:
            log.info("restore_stopped", progress=str(stopped))
        self._sampler.drain()
        # Before snapshots: a snapshot is valid only after the saves that it covers.
        self._weights.drain(self._left_s())
        self._runs.copies.drain(self._left_s())
        self._heartbeat.end()
        self._execution.leave_in_order()
        self._drain.end(self._execution.epoch)
        self._execution.leave()

    def _left_s(self) -> float:
        return max(0.0, self._drain_until - time.monotonic())

    def _describe(self) -> WorkerHeartbeat:
        """Return the current heartbeat, on the thread of the heartbeat. Raises connection errors."""
        self._drain.look()
        engine = self._engine
        seconds = self._device_time.seconds
        memory_bytes, memory_limit_bytes = engine.device_memory
        adapters = engine.adapters.by_tier
        snapshot_age_s, snapshot_due_s = self._runs.copies.snapshot_age
        processes = engine.processes
        return WorkerHeartbeat(
            id=self._execution.worker,
            epoch=self._execution.epoch,
            state=self._drain.state,
            is_handing_over=self._drain.is_handing_over or self._drain.leaves,
            device=self._record.device,
            tokens_per_s=self._throughput.tokens_per_s(engine.safe_tokens),
            runs=self._runs.resident,
            parked_runs=engine.adapters.offloaded,
            accepts_saves=self._backpressure.accepts_saves,
            memory_bytes=sum(process.memory_bytes for process in processes),
            seen_at=time.time(),
            restored_ops=self._runs.replayed_ops,
            restoring=self._runs.progress.now,
            samples_running=self._sampler.running,
            sample_tokens_per_s=self._sampler.tokens_per_s,
            samples_waiting=self._sampler.waiting,
            safe_tokens=engine.safe_tokens,
            halvings=engine.halvings,
            lora=engine.facts.numerics.lora,
            lora_fallback=engine.facts.lora_fallback,
            host=socket.gethostname(),
            device_seconds=seconds,
            duty=self._duty.shares(seconds, time.monotonic()),
            device_memory_bytes=memory_bytes,
            device_memory_limit_bytes=memory_limit_bytes,
            kv_cache_ratio=self._sampler.kv_cache_ratio,
            adapters={tier: count for tier, (count, _) in adapters.items()},
            adapter_bytes={tier: size for tier, (_, size) in adapters.items()},
            adapter_limit_bytes=engine.adapters.device_limit_bytes or 0,
            unstored_bytes=self._weights.unstored_bytes,
            snapshot_age_s=snapshot_age_s,
            snapshot_due_s=snapshot_due_s,
            self_check=self._self_check.last,
            members=[process._asdict() for process in processes] if len(processes) > 1 else [],
        )


def _nothing() -> None:
    pass
