"""Required number of workers of each pool, for an autoscaler. It starts and stops no worker itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import structlog

from cotrain_store.messages.fleet import Bounds, Pauses, Scaling, first_scaling
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.monitoring.backlog import Growth, workers_needed
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.settings.scheduler import SchedulerSettings

log = structlog.get_logger()

#: Interval between evaluations of a pool's demand.
LOOK_S = 2.0
#: Interval at which an unchanged decision is written again, so that it does not become stale.
WRITE_S = 10.0


class PoolScaling:
    """Scaling decisions for one pool, by the leading scheduler."""

    def __init__(self, dispatch: Dispatch, pool: PoolId, settings: SchedulerSettings) -> None:
        self._dispatch = dispatch
        self._records = dispatch.scalings
        self._pool = pool
        self._bounds = Bounds(settings.workers_min, settings.workers_max, settings.idle_after_s)
        self._growth = Growth()
        self._decided: Scaling | None = None
        self._written: Scaling | None = None

    def forget(self) -> None:
        """Drop the last decision and read the stored one, because another scheduler may have led."""
        self._decided = None

    async def look(self, waiting_tokens: Mapping[WorkerId, int], pauses: Pauses) -> None:
        """Decide the number of workers, and write the decision if it changed or its record is old.

        Raises:
            Fenced: a newer scheduler leads.
        """
        now = time.time()
        demand = await self._records.demand(self._pool, pauses)
        before = self._decided or await self._records.read(self._pool)
        before = before or first_scaling(len(demand.rates), now, self._bounds)
        growth = self._growth.per_second(demand.tokens, now)
        needed = workers_needed(replace(demand, growth=growth))
        decided = before.after(needed, now, self._bounds, waiting_tokens)
        if decided.wanted != before.wanted:
            log.info("workers_wanted", pool=self._pool, wanted=decided.wanted, needed=needed)
        self._decided = decided
        if not self._written or decided.differs(self._written, WRITE_S):
            await self._records.write(self._pool, decided, self._dispatch.epoch)
            self._written = decided
