"""Have runs in memory, brought back from their logs if need be; stop those that cannot be, alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import structlog

from cotrain_store.errors import SpoolCorrupt
from cotrain_store.execution import RUN_STOPPED
from cotrain_store.failpoints import failpoint
from cotrain_workers.ops import Failure
from cotrain_workers.recovery import ReplayDiverged

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_store.execution import Execution
    from cotrain_store.messages import RunId, TenantId, WeightsRecord
    from cotrain_workers.keeper import Keeper
    from cotrain_workers.weights_store import WeightsStore

    Between = Callable[[], None] | None  # called after each micro-batch

log = structlog.get_logger()


class Runs:
    """The runs of one worker, as its loop needs them."""

    def __init__(self, execution: Execution, keeper: Keeper, weights: WeightsStore) -> None:
        self._execution = execution
        self._keeper = keeper
        self._weights = weights
        self.replayed_ops = 0
        self.uncounted: Counter[str] = Counter()
        """For the pool's totals; whoever has written them clears it."""

    def ensure(self, run: RunId, tenant: TenantId, between: Between) -> Failure | None:
        """Have a run in memory; a Failure for all its requests if it had to be stopped."""
        try:
            self._restore(run, between)
        except (ReplayDiverged, SpoolCorrupt) as broken:
            return self.stop(run, tenant, broken)
        return None

    def start_over(self, run: RunId) -> None:
        """Bring a run back to its last committed state; raises ReplayDiverged, SpoolCorrupt."""
        self._keeper.forget_state(run)
        self._restore(run, None)

    def make_again(self, weights: WeightsRecord, between: Between) -> None:
        """Replay the run whose saved weights were lost before they were on disk."""
        self.ensure(weights.run, weights.tenant, between)
        if self._weights.is_lost(weights.ref):
            self._weights.give_up(weights.ref)

    def stop(self, run: RunId, tenant: TenantId, broken: ReplayDiverged | SpoolCorrupt) -> Failure:
        """Stop a run that cannot go on."""
        log.error("run_failed", run=run, reason=str(broken))
        self.uncounted["diverged_runs"] += isinstance(broken, ReplayDiverged)
        self._execution.fail_run(run, tenant)
        self._keeper.forget_state(run)
        return Failure(RUN_STOPPED.json()["error"], "server")

    def _restore(self, run: RunId, between: Between) -> None:
        replayed = self._keeper.ensure(run, between)
        failpoint("worker.replayed", run)
        self.replayed_ops += replayed
        self.uncounted["replayed_ops"] += replayed
