"""Bisection of a failing step: find the request that breaks the engine or crashes its process, and run the others.

An exception is located at once: each run returns to its last committed state and its ops run one by one. A crash
leaves no process to report it. Each group of a step's ops is therefore recorded in the store before it runs, and
removed afterwards. A group that is still recorded at the next start is split in halves, first between two runs,
then within one. The split ends at a single op during which MAX_CRASHES processes crashed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RequestId, RunId, request_id
from cotrain_store.oplog.execution import Execution
from cotrain_workers.engine.ops import CycleOutput, Failure, Op, Output
from cotrain_workers.group.engine import Trainer

log = structlog.get_logger()

#: Number of crashes after which a step is split in halves, and after which a single op counts as
#: the cause.
MAX_CRASHES = 2

#: Failures of a request that breaks the engine, and of one that crashes it. Neither may ever run
#: again, not even in a replay.
CRASHED = Failure("Internal error: this request could not be run.", "server")
POISON = Failure("Request repeatedly crashed the worker; it was not applied.", "server")


@dataclass
class Answers:
    """Outputs of ops that ran in several engine cycles."""

    outputs: dict[tuple[str, int], Output] = field(default_factory=dict)
    is_exact: bool = True
    """False if memory ran out in one of them, or in a replay (`CycleOutput.is_exact`)."""

    def add(self, more: CycleOutput | Answers) -> None:
        """Add the outputs of further ops."""
        self.outputs.update(more.outputs)
        self.is_exact = self.is_exact and more.is_exact


class Risks:
    """Record of ops that may crash this process, for its successor."""

    def __init__(self, execution: Execution, await_writes: Callable[[], None]) -> None:
        """`await_writes` returns once no save and no copy is in progress.

        Otherwise a crash caused by one of those would be counted against an innocent request.
        """
        self._execution = execution
        self._await_writes = await_writes
        self._crash_counts = execution.crash_counts.by_part()
        self._noted: str | None = None

    @property
    def crashed_groups(self) -> Collection[str]:
        """Return the groups during which a process crashed."""
        return self._crash_counts.keys()

    def is_poison(self, op: Op) -> bool:
        """Return True if processes crashed during this op alone, too often for chance."""
        return self._crash_counts.get(request_of(op), 0) >= MAX_CRASHES

    def note(self, group: Sequence[Op]) -> None:
        """Count a crash in advance. `survived` removes it, if this process still runs to call it."""
        self.survived()  # the earlier group may have raised, or its response was lost
        self._await_writes()
        self._noted = name_of(group)
        self._execution.crash_counts.risk(self._noted)
        failpoint("worker.before_risk", map(request_of, group))

    def survived(self) -> None:
        """Remove the record of the current group, including a predecessor's, because it does not crash."""
        if self._noted is not None:
            failpoint("worker.after_risk", self._noted)
            self._execution.crash_counts.survived(self._noted)
            self._noted = None


def groups_of(ops: Sequence[Op], crashed: Collection[str]) -> list[Sequence[Op]]:
    """Split ops, those of a run adjacent, until no group is one during which a process crashed. Pure."""
    if len(ops) == 1 or name_of(ops) not in crashed:
        return [ops]
    half = len(ops) // 2
    borders = [at for at in range(1, len(ops)) if ops[at].run != ops[at - 1].run]
    at = min(borders or [half], key=lambda border: abs(border - half))
    return groups_of(ops[:at], crashed) + groups_of(ops[at:], crashed)


def name_of(group: Sequence[Op]) -> str:
    """Return the name of a group of ops: its request, or its first and last."""
    first, last = request_of(group[0]), request_of(group[-1])
    return first if len(group) == 1 else f"{first}..{last}"


def run_in_groups(
    engine: Trainer, risks: Risks, ops: Sequence[Op], run_separately: Callable[[str], Answers]
) -> Answers:
    """Run a step that crashed its processes: in halves, and without the ops that crash.

    `run_separately` runs one run's ops from its last committed state (`run_alone`). It is called
    where a group raises.
    """
    answers = Answers()
    separate: set[str] = set()
    for group in groups_of(ops, {*risks.crashed_groups, name_of(ops)}):
        if group[0].run in separate:
            continue  # an earlier group of this run raised
        if len(group) == 1 and risks.is_poison(group[0]):
            answers.outputs[group[0].run, group[0].seq] = POISON
            continue
        risks.note(group)
        try:
            answers.add(engine.run(group))
        except Exception:
            log.exception("group_failed", group=name_of(group))
        else:
            risks.survived()
            continue
        engine.check_device()
        for run in dict.fromkeys(op.run for op in group):
            answers.add(run_separately(run))
            separate.add(run)
    return answers


def run_alone(engine: Trainer, ops: Sequence[Op], reload_state: Callable[[], bool], risks: Risks | None) -> Answers:
    """Run one run's ops repeatedly, each time without one more op that breaks the engine.

    `reload_state` restores the last committed state of the run, and returns True if it did so to
    the bit. With `risks` each op may crash.
    """
    failed: dict[tuple[str, int], Output] = {
        (op.run, op.seq): POISON for op in ops if risks is not None and risks.is_poison(op)
    }
    while True:
        answers = Answers(dict(failed), is_exact=reload_state())
        left = [op for op in ops if (op.run, op.seq) not in failed]
        failing = _run_one_by_one(engine, left, answers, risks)
        if failing is None:
            return answers
        failed[failing.run, failing.seq] = CRASHED


def _run_one_by_one(engine: Trainer, ops: Sequence[Op], answers: Answers, risks: Risks | None) -> Op | None:
    """Fill `answers` up to the first op that breaks the engine, and return that op."""
    for op in ops:
        if risks is not None:
            risks.note([op])
        try:
            answers.add(engine.run([op]))
        except Exception:
            log.exception("op_failed", request=request_of(op), run=op.run, seq=op.seq)
        else:
            if risks is not None:
                risks.survived()
            continue
        engine.check_device()
        return op
    return None


def request_of(op: Op) -> RequestId:
    """Return the request of an op."""
    return request_id(RunId(op.run), op.seq)
