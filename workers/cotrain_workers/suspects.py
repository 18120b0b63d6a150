"""Find the request of one run that breaks the engine, or kills its process, and run the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.messages import RunId, request_id
from cotrain_workers.ops import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_store.execution import Execution
    from cotrain_workers.engine import Engine
    from cotrain_workers.ops import Op, Output

    Outputs = dict[tuple[str, int], Output]

log = structlog.get_logger()

#: A request over which so many processes died, alone, is what kills them. High enough for kills that
#: come from outside.
MAX_DEATHS = 3

#: The answer to a request that breaks the engine. It must never be run again, not even by a replay.
CRASHED = Failure("Internal error: this request could not be run.", "server")


def run_alone(
    engine: Engine,
    execution: Execution,
    ops: Sequence[Op],
    start_over: Callable[[], None],
    *,
    is_deadly: bool,
) -> Outputs:
    """Run one run's ops again and again, each time without one more that breaks the engine.

    `start_over` brings the run back to its last committed state.
    """
    deaths = execution.deaths() if is_deadly else {}
    crashed: Outputs = {
        (op.run, op.seq): CRASHED
        for op in ops
        if deaths.get(request_id(RunId(op.run), op.seq), 0) >= MAX_DEATHS
    }
    while True:
        start_over()
        outputs: Outputs = {}
        left = [op for op in ops if (op.run, op.seq) not in crashed]
        guilty = _run_one_by_one(engine, execution, left, outputs, is_deadly=is_deadly)
        if guilty is None:
            return outputs | crashed
        crashed[guilty.run, guilty.seq] = CRASHED


def _run_one_by_one(
    engine: Engine, execution: Execution, ops: Sequence[Op], outputs: Outputs, *, is_deadly: bool
) -> Op | None:
    """Fill `outputs` up to the first op that breaks the engine, and return that one."""
    for op in ops:
        request = request_id(RunId(op.run), op.seq)
        if is_deadly:
            execution.risk(request)
            failpoint("worker.before_risk", request)
        try:
            outputs.update(engine.run([op]).outputs)
        except Exception:
            log.exception("op_failed", run=op.run, seq=op.seq)
            return op
        if is_deadly:
            failpoint("worker.after_risk", request)
            execution.survived(request)
    return None
