"""Drain state of a worker: its runs move to another worker, and it accepts no new work.

The heartbeat's thread updates the state. The worker loop reads it to decide its next action; the heartbeat reports
the progress. A worker hands over one run at a time while it continues, after the run's last op is in a snapshot.
"""

from dataclasses import dataclass

import structlog

from cotrain_store.failpoints import failpoint
from cotrain_store.oplog.execution import Execution
from cotrain_store.oplog.moves import OwnDrain
from cotrain_workers.checkpoints.weights_store import WeightsStore
from cotrain_workers.recovery.resident_runs import ResidentRuns
from cotrain_workers.sampling.service import SamplingService

log = structlog.get_logger()


@dataclass
class Drain:
    """Drain of one worker, from the operator's request until its withdrawal or the end of the process."""

    own: OwnDrain
    residents: ResidentRuns
    weights: WeightsStore
    sampler: SamplingService
    is_asked: bool = False
    leaves: bool = False
    """True if this process is shutting down. Nothing is planned for it, with or without another worker."""
    is_handing_over: bool = False
    """True if another worker exists to take over the runs. Any thread may read it."""

    @property
    def state(self) -> str:
        """State as the heartbeat reports it."""
        if self.leaves:
            return "draining"
        if not self.is_asked:
            return "serving"
        has_work = self.residents.runs or self.weights.unstored or self.sampler.running
        return "drained" if self.is_handing_over and not has_work else "draining"

    def look(self) -> None:
        """Read the operator's request, and check for another worker."""
        if self.leaves:
            return
        is_asked = self.own.is_asked()
        is_handing_over = is_asked and self.own.has_successor()
        if self.is_handing_over and not is_handing_over and not self.own.is_listed():
            self.own.rejoin()
        if (is_asked, is_handing_over) != (self.is_asked, self.is_handing_over):
            log.info("drain_changed", asked=is_asked, is_handing_over=is_handing_over)
        self.is_asked, self.is_handing_over = is_asked, is_handing_over

    def go_on(self) -> None:
        """Hand over runs between steps during a handover, and claim no samples then."""
        self.sampler.accepts_requests = not self.is_handing_over
        if self.is_handing_over:
            self.residents.hand_over()

    @property
    def could_end(self) -> bool:
        """True if another worker can take over this one's work."""
        return self.own.has_successor()

    def end(self, epoch: int) -> bool:
        """Deregister the worker if another worker can take its runs, so that they can move anywhere at once.

        Return False if no worker can, or if work is left here: the next process with this worker id continues it.
        """
        is_over = self.own.deregister(epoch)
        log.info("worker_left", runs_go_elsewhere=is_over)
        return is_over


@dataclass
class RunMoves:
    """Runs to move away from this worker, checked between steps."""

    execution: Execution
    residents: ResidentRuns

    def go_on(self) -> None:
        """Copy out the runs that must move, and hand over those with a complete copy.

        Raises:
            Fenced: another process took over this worker id.
        """
        for move in self.execution.moves.wanted():
            in_memory = self.residents.done(move.run) >= 0
            if in_memory and not self.residents.is_copied(move.run):
                continue
            failpoint("move.before", move.run)
            if self.execution.moves.hand_over(move, self.execution.epoch, in_memory=in_memory):
                failpoint("move.after", move.run)
                self.residents.forget_state(move.run)
                log.info("run_moved", run=move.run, to=move.to)
