"""State and execution of one cycle: groups of adapters, waves of passes, steps, saves and loads."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cotrain_workers.engine.adapters.adapter import DRAWN_AT_ONCE, Adapter
from cotrain_workers.engine.adapters.bank import AdapterBank
from cotrain_workers.engine.adapters.lifecycle import begin, load, save
from cotrain_workers.engine.coordination import Yielding, timed
from cotrain_workers.engine.facts import ModelFacts
from cotrain_workers.engine.ops import (
    CycleOutput,
    CyclePart,
    Failure,
    Load,
    Op,
    OpId,
    OptimStep,
    Output,
    Pass,
    PassProgress,
    ReverseKl,
    Save,
    begins_run,
    unknown_run,
)
from cotrain_workers.engine.training.adamw import take_steps
from cotrain_workers.engine.training.forward_backward import ForwardBackward
from cotrain_workers.engine.training.losses import refuse_pass, refuse_reverse_kl
from cotrain_workers.engine.training.micro_batches import PassesCost
from cotrain_workers.engine.training.pass_state import OpenPasses, PassState

#: Datums of a pass that are checked without a break, in about 10 ms.
MANY_DATUMS = 8_192


@dataclass
class RunningCycle:
    """One cycle of an engine; see `Engine.cycle`."""

    facts: ModelFacts
    adapters: AdapterBank
    open_passes: OpenPasses
    forward_backward: ForwardBackward
    allowances: Mapping[OpId, int]
    is_over: Callable[[], bool]
    outputs: dict[OpId, Output] = field(default_factory=dict)
    divided: dict[OpId, PassProgress] = field(default_factory=dict)
    deferred: set[str] = field(default_factory=set)  # runs whose remaining ops wait for a later cycle
    opened: Mapping[OpId, PassState] = field(default_factory=dict)  # by earlier cycles
    cost: PassesCost = field(default_factory=PassesCost)
    wave_s: float = 0.0
    optim_s: float = 0.0
    is_exact: bool = True
    parts: list[CyclePart] = field(default_factory=list)

    def run(self, ops: Sequence[Op]) -> Yielding[CycleOutput]:
        """Run the cycle and return its output."""
        self.opened = self.open_passes.take({op.run: op.seq for op in reversed(ops)})
        yield from self._begin_runs(ops)
        self._expect_open_gradients(ops)
        try:
            for runs in self.adapters.device_groups(list(dict.fromkeys(op.run for op in ops))):
                yield from self._run_group(runs, [op for op in ops if op.run in runs])
        finally:
            self.adapters.release()
        return CycleOutput(
            outputs=self.outputs,
            forwards=self.cost.forwards,
            tokens=self.cost.tokens,
            padded_tokens=self.cost.padded_tokens,
            wave_s=self.wave_s,
            optim_s=self.optim_s,
            is_exact=self.is_exact,
            divided=self.divided,
            parts=tuple(self.parts),
        )

    def _begin_runs(self, ops: Sequence[Op]) -> Yielding[None]:
        """Create the adapters of new runs. Yields after every DRAWN_AT_ONCE values."""
        values = 0
        for op in ops:
            if begins_run(op):
                self.outputs[op.id] = yield from begin(self.adapters, op, self.facts.max_rank)
                # A checkpoint or an upload takes as long to copy as a fresh adapter.
                values += self.adapters[op.run].layout.size if op.run in self.adapters else 0
                if values >= DRAWN_AT_ONCE:
                    values = 0
                    yield

    def _expect_open_gradients(self, ops: Sequence[Op]) -> None:
        """Reserve space for the gradients of passes that may stay open, before adapters are placed on the device."""
        for op in ops:
            if (
                isinstance(op, Pass | ReverseKl)
                and op.needs_grad
                and op.id in self.allowances
                and op.run in self.adapters
            ):
                self.adapters[op.run].has_open_gradient = True

    def _run_group(self, runs: Sequence[str], ops: Sequence[Op]) -> Yielding[None]:
        """Run the ops of adapters that fit on the device together: mostly all of the cycle."""
        began_at = time.time()
        adapters, wave_s = yield from timed(self._run_passes(runs, ops))
        stepped_at = time.time()
        _, optim_s = yield from timed(self._run_other_ops(adapters, ops))
        self.wave_s += wave_s
        self.optim_s += optim_s
        self.parts.append(CyclePart("wave", began_at, stepped_at))
        self.parts.append(CyclePart("optim", stepped_at, time.time()))

    def _run_passes(self, runs: Sequence[str], ops: Sequence[Op]) -> Yielding[dict[str, Adapter]]:
        """Run passes, wave by wave; return the adapters, which are on the device."""
        adapters = self.adapters.bring_in(runs)
        waiting = [op for op in ops if isinstance(op, Pass | ReverseKl)]
        while waiting:
            wave, waiting = next_wave(waiting, self.allowances)
            passes = yield from self._admit(wave, adapters)
            yield from self.forward_backward.run(passes, self.cost, self.is_over)
            for state in passes:
                self._note(state)
            if waiting and self.is_over():
                self.deferred.update(op.run for op in waiting)
            waiting = [op for op in waiting if op.run not in self.deferred]
        return adapters

    def _run_other_ops(self, adapters: Mapping[str, Adapter], ops: Sequence[Op]) -> Yielding[None]:
        """Run optimizer steps, then saves and loads, of runs whose passes have ended."""
        rest = [op for op in ops if op.run not in self.deferred]
        steps = [op for op in rest if isinstance(op, OptimStep)]
        if steps:
            take_steps(adapters, steps, self.outputs)
        for op in rest:
            if isinstance(op, Save):
                self.outputs[op.id] = save(self.adapters, op)
                yield
            elif isinstance(op, Load) and not op.creates:
                self.outputs[op.id] = load(self.adapters, op)
                yield
        for run, adapter in adapters.items():
            if adapter.has_open_gradient and run not in self.open_passes.runs:
                adapter.drop_open_gradient()

    def _admit(self, ops: Sequence[Pass | ReverseKl], adapters: Mapping[str, Adapter]) -> Yielding[list[PassState]]:
        """Return the started or resumed passes that can run; write a failure for each of the others.

        Yields before each pass of many datums, whose checks take long.
        """
        admitted = []
        for op in ops:
            if len(op.datums) > MANY_DATUMS:
                yield
            if op.run not in adapters:
                self.outputs[op.id] = unknown_run()
                continue
            adapter, allowance = adapters[op.run], self.allowances.get(op.id)
            state = self.opened.get(op.id)
            if state and state.adapter is adapter:
                state.resume(allowance)
                admitted.append(state)
            elif reason := self._refuse(op):
                self.outputs[op.id] = Failure(reason, "user")
            else:
                admitted.append(PassState(op, adapter, allowance))
        return admitted

    def _refuse(self, op: Pass | ReverseKl) -> str | None:
        limits = (self.facts.vocab_size, self.facts.context_length)
        if isinstance(op, ReverseKl):
            return refuse_reverse_kl(op, *limits, layout_of=self.adapters.layout_of)
        if self.facts.images is None and any(datum.images for datum in op.datums):
            return "This base model reads no images here."
        return refuse_pass(op, *limits)

    def _note(self, state: PassState) -> None:
        """Record the result of a pass, or keep it open and defer the rest of its run."""
        op_id = state.op.id
        if state.output is None:
            self.open_passes.keep(state)
            self.deferred.add(state.op.run)
        else:
            self.outputs[op_id] = state.output
            self.is_exact = self.is_exact and state.is_exact
        if state.output is None or state.rows_before:
            self.divided[op_id] = PassProgress(state.rows_now, state.done_rows)


def next_wave(
    passes: Sequence[Pass | ReverseKl], allowances: Mapping[OpId, int]
) -> tuple[list[Pass | ReverseKl], list[Pass | ReverseKl]]:
    """Split passes into those that may run now and those that wait. Passes of a run keep their order.

    A run waits behind a pass that may stay open, until that pass ends or until the next cycle.
    """
    wave: list[Pass | ReverseKl] = []
    later: list[Pass | ReverseKl] = []
    waiting: set[str] = set()
    for op in passes:
        (later if op.run in waiting else wave).append(op)
        if op.id in allowances:
            waiting.add(op.run)
    return wave, later
