"""Whether this worker is being drained, or leaves: its runs go to another one, and it takes nothing more.

Looked at with every heartbeat, from its thread. The loop asks what is to be done; the heartbeat says how far it is.

Hand runs over to other workers, one by one, while this one goes on: copied out at their last op first.
"""

from __future__ import annotations

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.moves import OwnDrain
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.recovery.resident_runs import ResidentRuns
from cotrain_workers.sampling.service import SamplingService

log = structlog.get_logger()


class Drain:
    """One worker's drain, from the operator's request until that is taken back; or until its process ends."""

    def __init__(
        self,
        own: OwnDrain,
        residents: ResidentRuns,
        weights: WeightsStore,
        sampler: SamplingService,
    ) -> None:
        self._own = own
        self._residents = residents
        self._weights = weights
        self._sampler = sampler
        self.is_asked = False
        self.leaves = False
        """This process is to end: nothing more is planned for it, whether another worker is there or not."""
        self.is_handing_over = False
        """Another worker is there: what this one has goes to it. Any thread may look."""

    @property
    def state(self) -> str:
        """Name it as the heartbeat does."""
        if self.leaves:
            return "draining"
        if not self.is_asked:
            return "serving"
        has_work = self._residents.runs or self._weights.unstored or self._sampler.running
        return "drained" if self.is_handing_over and not has_work else "draining"

    def look(self) -> None:
        """See what the operator wants now, and whether another worker could go on."""
        if self.leaves:
            return
        is_asked = self._own.is_asked()
        is_handing_over = is_asked and self._own.has_successor()
        if self.is_handing_over and not is_handing_over and not self._own.is_listed():
            self._own.rejoin()
        if (is_asked, is_handing_over) != (self.is_asked, self.is_handing_over):
            log.info("drain_changed", asked=is_asked, is_handing_over=is_handing_over)
        self.is_asked, self.is_handing_over = is_asked, is_handing_over

    def go_on(self) -> None:
        """Between steps: hand runs over as long as that is asked for, and claim no samples then."""
        self._sampler.accepts_requests = not self.is_handing_over
        if self.is_handing_over:
            self._residents.hand_over()

    @property
    def could_end(self) -> bool:
        """Tell whether another worker can go on with what is here."""
        return self._own.has_successor()

    def end(self, epoch: int) -> bool:
        """Stand on the pool's list no more where another worker can go on: at once, its runs can go anywhere.

        False where none can, or something is left here: the next process of this worker id finds all of it.
        """
        is_over = self._own.deregister(epoch)
        log.info("worker_left", runs_go_elsewhere=is_over)
        return is_over


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
