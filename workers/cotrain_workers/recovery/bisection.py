"""Find the request that breaks the engine, or kills its process, and run the others.

What raises is found at once: each run goes back to its last committed state and its ops run one by one.
What kills leaves nobody to tell, so that each part of a step is noted in the store before it runs, and
struck off after. A part that is still noted when the next process starts is cut in halves, between the
runs first, then within one; down to a single op over which MAX_DEATHS processes died.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RunId, request_id
from cotrain_workers.engine.ops import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from cotrain_store.messages.ids import RequestId
    from cotrain_store.oplog.execution import Execution
    from cotrain_workers.engine.engine import Engine
    from cotrain_workers.engine.ops import Op, Output

    Outputs = dict[tuple[str, int], Output]

log = structlog.get_logger()

#: A step over which so many processes died is cut in halves, and a request over which so many died,
#: alone, is what kills them.
MAX_DEATHS = 2

#: The answers to a request that breaks the engine and to one that kills it. Neither must ever be run
#: again, not even by a replay.
CRASHED = Failure("Internal error: this request could not be run.", "server")
POISON = Failure("Request repeatedly crashed the worker; it was not applied.", "server")


class Risks:
    """Notes what may kill this process, for its successor to find."""

    def __init__(self, execution: Execution, await_writes: Callable[[], None]) -> None:
        """`await_writes` returns once no save and no copy is being written.

        A process that one of those killed would be counted against the request beside it.
        """
        self._execution = execution
        self._await_writes = await_writes
        self._deaths = execution.crash_counts.by_part()
        self._noted: str | None = None

    @property
    def died_over(self) -> Collection[str]:
        """Name the parts over which somebody died."""
        return self._deaths.keys()

    def is_poison(self, op: Op) -> bool:
        """Tell whether processes died over this op alone, too often for chance."""
        return self._deaths.get(_request(op), 0) >= MAX_DEATHS

    def note(self, part: Sequence[Op]) -> None:
        """Count a death in advance: `survived` takes it back, if there is anybody left to call it."""
        self.survived()  # of what was noted before: it may have raised, or its answer was lost
        self._await_writes()
        self._noted = name_of(part)
        self._execution.crash_counts.risk(self._noted)
        failpoint("worker.before_risk", map(_request, part))

    def survived(self) -> None:
        """Take back what was noted. Also what a predecessor noted of it: it does not kill."""
        if self._noted is not None:
            failpoint("worker.after_risk", self._noted)
            self._execution.crash_counts.survived(self._noted)
            self._noted = None


def parts_of(ops: Sequence[Op], died_over: Collection[str]) -> list[Sequence[Op]]:
    """Cut ops, those of a run side by side, until no part is left that somebody died over. Pure."""
    if len(ops) == 1 or name_of(ops) not in died_over:
        return [ops]
    half = len(ops) // 2
    between_runs = [at for at in range(1, len(ops)) if ops[at].run != ops[at - 1].run]
    at = min(between_runs or [half], key=lambda place: abs(place - half))
    return parts_of(ops[:at], died_over) + parts_of(ops[at:], died_over)


def name_of(part: Sequence[Op]) -> str:
    """Name a part of a step: by its request, or by its first and last."""
    first, last = _request(part[0]), _request(part[-1])
    return first if len(part) == 1 else f"{first}..{last}"


def run_in_parts(
    engine: Engine,
    risks: Risks,
    ops: Sequence[Op],
    run_by_itself: Callable[[str], Outputs],
) -> Outputs:
    """Run a step that killed its processes: in halves, and without what kills.

    `run_by_itself` runs one run's ops from its last committed state (`run_alone`); asked where a part
    raises instead.
    """
    outputs: Outputs = {}
    by_themselves: set[str] = set()
    for part in parts_of(ops, {*risks.died_over, name_of(ops)}):
        if part[0].run in by_themselves:
            continue  # an earlier part of this run raised
        if len(part) == 1 and risks.is_poison(part[0]):
            outputs[part[0].run, part[0].seq] = POISON
            continue
        risks.note(part)
        try:
            outputs.update(engine.run(part).outputs)
        except Exception:
            log.exception("part_failed", part=name_of(part))
        else:
            risks.survived()
            continue
        engine.check_device()
        for run in dict.fromkeys(op.run for op in part):
            outputs.update(run_by_itself(run))
            by_themselves.add(run)
    return outputs


def run_alone(
    engine: Engine, ops: Sequence[Op], start_over: Callable[[], None], risks: Risks | None
) -> Outputs:
    """Run one run's ops again and again, each time without one more that breaks the engine.

    `start_over` brings the run back to its last committed state. With `risks` each op may kill.
    """
    failed: Outputs = {
        (op.run, op.seq): POISON for op in ops if risks is not None and risks.is_poison(op)
    }
    while True:
        start_over()
        outputs: Outputs = {}
        left = [op for op in ops if (op.run, op.seq) not in failed]
        guilty = _run_one_by_one(engine, left, outputs, risks)
        if guilty is None:
            return outputs | failed
        failed[guilty.run, guilty.seq] = CRASHED


def _run_one_by_one(
    engine: Engine, ops: Sequence[Op], outputs: Outputs, risks: Risks | None
) -> Op | None:
    """Fill `outputs` up to the first op that breaks the engine, and return that one."""
    for op in ops:
        if risks is not None:
            risks.note([op])
        try:
            outputs.update(engine.run([op]).outputs)
        except Exception:
            log.exception("op_failed", request=_request(op), run=op.run)
        else:
            if risks is not None:
                risks.survived()
            continue
        engine.check_device()
        return op
    return None


def _request(op: Op) -> RequestId:
    return request_id(RunId(op.run), op.seq)
