"""Moves of runs between the workers of one pool: request them, pause the runs, cancel moves that fail."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from cotrain_scheduler.moving import PATIENCE_S, Balance
from cotrain_scheduler.queue import PoolQueue
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, RunId
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.moves import QUIET_S, Move

log = structlog.get_logger()

#: Interval between comparisons of the loads.
LOOK_S = 1.0


class Rebalancing:
    """Moves of one pool, by the operator and by the scheduler."""

    def __init__(self, dispatch: Dispatch, pool: PoolId) -> None:
        self._dispatch = dispatch
        self._pool = pool
        self._balance = Balance()
        self._since: dict[RunId, float] = {}
        self._moved: dict[RunId, float] = {}
        self._looked_at = 0.0

    async def moving_runs(
        self, workers: Sequence[WorkerHeartbeat], queue: PoolQueue, now: float
    ) -> frozenset[RunId]:
        """Return the runs that are being moved, including new moves; nothing is planned for them.

        Raises:
            Fenced: a newer scheduler leads.
        """
        if len(workers) < 2:  # no move is possible
            self._since.clear()
            return frozenset()
        wanted = await self._dispatch.moves.wanted(self._pool)
        self._since = {move.run: self._since.get(move.run, now) for move in wanted}
        moving = {move.run for move in wanted if await self._is_under_way(move, workers, now)}
        if not wanted and not 0 <= now - self._looked_at < LOOK_S:
            self._looked_at = now
            moving |= await self._even_out(workers, queue, now)
        return frozenset(moving)

    async def _is_under_way(
        self, move: Move, workers: Sequence[WorkerHeartbeat], now: float
    ) -> bool:
        serving = {worker.id for worker in workers}
        if {move.owner, move.to} <= serving and now - self._since[move.run] < PATIENCE_S:
            return True
        await self._dispatch.moves.deregister(self._pool, move.run)
        log.warning("move_given_up", pool=self._pool, run=move.run, to=move.to)
        return False

    async def _even_out(
        self, workers: Sequence[WorkerHeartbeat], queue: PoolQueue, now: float
    ) -> set[RunId]:
        self._moved = {run: at for run, at in self._moved.items() if 0 <= now - at < QUIET_S}
        loads = [queue.load_of(worker, now) for worker in workers if worker.state == "serving"]
        moving = set()
        for run, to in self._balance.moves(loads, now, self._moved):
            self._moved[run] = now
            if await self._dispatch.ask_move(self._pool, run, to):
                moving.add(run)
                queue.recent.settle(run, to, now)
                log.info("move_asked", pool=self._pool, run=run, to=to)
        return moving
