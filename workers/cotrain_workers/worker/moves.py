"""Hand runs over to other workers, one by one, while this one goes on: copied out at their last op first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from cotrain_store.failpoints import failpoint

if TYPE_CHECKING:
    from cotrain_store.oplog.execution import Execution
    from cotrain_workers.recovery.resident_runs import ResidentRuns

log = structlog.get_logger()


class RunMoves:
    """What is to be moved from here, looked at between steps."""

    def __init__(self, execution: Execution, residents: ResidentRuns) -> None:
        self._execution = execution
        self._residents = residents

    def go_on(self) -> None:
        """Copy out the runs that are to go, and hand over those of which a copy holds everything.

        Raises:
            Fenced: another process took this worker's place.
        """
        for move in self._execution.moves.wanted():
            in_memory = self._residents.done(move.run) >= 0
            if in_memory and not self._residents.is_copied(move.run):
                continue
            failpoint("move.before", move.run)
            if self._execution.moves.hand_over(move, self._execution.epoch, in_memory=in_memory):
                failpoint("move.after", move.run)
                self._residents.forget_state(move.run)
                log.info("run_moved", run=move.run, to=move.to)
