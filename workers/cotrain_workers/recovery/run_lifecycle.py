"""Have runs in memory, brought back from their logs if need be; stop those that cannot be, alone."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import structlog

from cotrain_store.disk.result_storage import RUN_STOPPED
from cotrain_store.errors import SpoolCorrupt
from cotrain_store.failpoints import failpoint
from cotrain_workers.engine.cycle import run_to_end
from cotrain_workers.engine.ops import Failure
from cotrain_workers.recovery.replay import ReplayDiverged

if TYPE_CHECKING:
    from cotrain_store.messages.ids import RunId, TenantId
    from cotrain_store.messages.weights import WeightsRecord
    from cotrain_store.oplog.execution import Execution
    from cotrain_workers.checkpoints.weights_store import WeightsStore
    from cotrain_workers.engine.cycle import Yielding
    from cotrain_workers.recovery.resident_runs import Keeper

log = structlog.get_logger()

#: A disk that hangs for longer keeps no step waiting.
WRITES_S = 30.0


class Runs:
    """The runs of one worker, as its loop needs them."""

    def __init__(self, execution: Execution, keeper: Keeper, weights: WeightsStore) -> None:
        self._execution = execution
        self._keeper = keeper
        self._weights = weights
        self.replayed_ops = 0
        self.rollbacks = 0
        self.uncounted: Counter[str] = Counter()
        """For the pool's totals; whoever has written them clears it."""

    def ensure(
        self, run: RunId, tenant: TenantId, *, before: int | None = None
    ) -> Yielding[Failure | None]:
        """Have a run in memory; a Failure for all its requests if it had to be stopped.

        What is in memory serves only as the state right before seq `before`: another worker may have
        had the run since.
        """
        if before is not None and self._keeper.done(run) != before - 1:
            self._keeper.forget_state(run)
        try:
            yield from self._restore(run)
        except ReplayDiverged as diverged:
            return self.stop(run, tenant, diverged)
        except SpoolCorrupt as lost:
            if not self._keeper.roll_back(run):
                return self.stop(run, tenant, lost)
            self._note_rollback(run)
        return None

    def start_over(self, run: RunId) -> None:
        """Bring a run back to its last committed state; raises ReplayDiverged, SpoolCorrupt."""
        self._keeper.forget_state(run)
        run_to_end(self._restore(run))

    def make_again(self, weights: WeightsRecord) -> Yielding[None]:
        """Replay the run whose saved weights were lost before they were on disk."""
        yield from self.ensure(weights.run, weights.tenant)
        if self._weights.is_lost(weights.ref):
            self._weights.give_up(weights.ref)

    def await_writes(self) -> None:
        """Wait until no save and no copy is being written, at most WRITES_S."""
        until = time.monotonic() + WRITES_S
        self._weights.await_writes(until)
        self._keeper.await_writes(until)

    def stop(self, run: RunId, tenant: TenantId, broken: ReplayDiverged | SpoolCorrupt) -> Failure:
        """Stop a run that cannot go on."""
        log.error("run_failed", run=run, reason=str(broken))
        self.uncounted["diverged_runs"] += isinstance(broken, ReplayDiverged)
        self._execution.fail_run(run, tenant)
        self._keeper.forget_state(run)
        return Failure(RUN_STOPPED.json()["error"], "server")

    def _note_rollback(self, run: RunId) -> None:
        self.rollbacks += 1
        for owed in self._weights.lost():
            if owed.run == run:  # the log that would have made them again is gone
                self._weights.give_up(owed.ref)

    def _restore(self, run: RunId) -> Yielding[None]:
        replayed = yield from self._keeper.ensure(run)
        failpoint("worker.replayed", run)
        self.replayed_ops += replayed
        self.uncounted["replayed_ops"] += replayed
