"""Bisection: find the request that breaks the engine, or kills its process, and run the others.

What raises is found at once: each run goes back to its last committed state and its ops run one by one.
What kills leaves no process to report it, so that each group of a step's ops is noted in the store before
it runs, and struck off after. A group that is still noted when the next process starts is split in
halves, at a border of two runs first, then within one; down to a single op during which MAX_CRASHES
processes died.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RequestId, RunId, request_id
from cotrain_store.oplog.execution import Execution
from cotrain_workers.engine.ops import CycleOutput, Failure, Op, Output
from cotrain_workers.engine.trainer import Trainer

log = structlog.get_logger()

#: A step during which so many processes died is split in halves, and a request during which so many died,
#: alone, is what kills them.
MAX_CRASHES = 2

#: The answers to a request that breaks the engine and to one that kills it. Neither must ever be run
#: again, not even by a replay.
CRASHED = Failure("Internal error: this request could not be run.", "server")
POISON = Failure("Request repeatedly crashed the worker; it was not applied.", "server")


@dataclass
class Answers:
    """What ops gave that ran in several engine cycles."""

    outputs: dict[tuple[str, int], Output] = field(default_factory=dict)
    is_exact: bool = True
    """False: memory ran out in one of them, or in a replay (`CycleOutput.is_exact`)."""

    def add(self, more: CycleOutput | Answers) -> None:
        """Take what came of further ops."""
        self.outputs.update(more.outputs)
        self.is_exact = self.is_exact and more.is_exact


class Risks:
    """Notes what may kill this process, for its successor to find."""

    def __init__(self, execution: Execution, await_writes: Callable[[], None]) -> None:
        """`await_writes` returns once no save and no copy is being written.

        A process that one of those killed would be counted against a request that did nothing.
        """
        self._execution = execution
        self._await_writes = await_writes
        self._crash_counts = execution.crash_counts.by_part()
        self._noted: str | None = None

    @property
    def crashed_groups(self) -> Collection[str]:
        """Name the groups during which a process died."""
        return self._crash_counts.keys()

    def is_poison(self, op: Op) -> bool:
        """Tell whether processes died during this op alone, too often for chance."""
        return self._crash_counts.get(_request(op), 0) >= MAX_CRASHES

    def note(self, group: Sequence[Op]) -> None:
        """Count a crash in advance: `survived` takes it back, if this process is there to call it."""
        self.survived()  # of what was noted before: it may have raised, or its answer was lost
        self._await_writes()
        self._noted = name_of(group)
        self._execution.crash_counts.risk(self._noted)
        failpoint("worker.before_risk", map(_request, group))

    def survived(self) -> None:
        """Take back what was noted. Also what a predecessor noted of it: it does not kill."""
        if self._noted is not None:
            failpoint("worker.after_risk", self._noted)
            self._execution.crash_counts.survived(self._noted)
            self._noted = None


def groups_of(ops: Sequence[Op], crashed: Collection[str]) -> list[Sequence[Op]]:
    """Split ops, those of a run side by side, until no group is one during which a process died. Pure."""
    if len(ops) == 1 or name_of(ops) not in crashed:
        return [ops]
    half = len(ops) // 2
    borders = [at for at in range(1, len(ops)) if ops[at].run != ops[at - 1].run]
    at = min(borders or [half], key=lambda border: abs(border - half))
    return groups_of(ops[:at], crashed) + groups_of(ops[at:], crashed)


def name_of(group: Sequence[Op]) -> str:
    """Name a group of a step's ops: by its request, or by its first and last."""
    first, last = _request(group[0]), _request(group[-1])
    return first if len(group) == 1 else f"{first}..{last}"


def run_in_groups(
    engine: Trainer,
    risks: Risks,
    ops: Sequence[Op],
    run_separately: Callable[[str], Answers],
) -> Answers:
    """Run a step that killed its processes: in halves, and without what kills.

    `run_separately` runs one run's ops from its last committed state (`run_alone`); asked where a group
    raises instead.
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


def run_alone(
    engine: Trainer, ops: Sequence[Op], reload_state: Callable[[], bool], risks: Risks | None
) -> Answers:
    """Run one run's ops again and again, each time without one more that breaks the engine.

    `reload_state` brings the run back to its last committed state, and tells whether to the bit. With
    `risks` each op may kill.
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


def _run_one_by_one(
    engine: Trainer, ops: Sequence[Op], answers: Answers, risks: Risks | None
) -> Op | None:
    """Fill `answers` up to the first op that breaks the engine, and return that one."""
    for op in ops:
        if risks is not None:
            risks.note([op])
        try:
            answers.add(engine.run([op]))
        except Exception:
            log.exception("op_failed", request=_request(op), run=op.run, seq=op.seq)
        else:
            if risks is not None:
                risks.survived()
            continue
        engine.check_device()
        return op
    return None


def _request(op: Op) -> RequestId:
    return request_id(RunId(op.run), op.seq)
