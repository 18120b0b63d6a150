"""Moves of runs between the workers of one pool, to balance the load or by the operator's request.

A run stays on its worker while the balance is good enough: a move costs a copy, and delays its requests. The decision
(`Balance`) is pure, and its times are in seconds. `Rebalancing` requests moves, pauses their runs, and cancels moves that fail.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import structlog

from cotrain_scheduler.placement import MEMORY_S
from cotrain_scheduler.queue import PoolQueue
from cotrain_store.messages.fleet import Move, WorkerHeartbeat
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.oplog.dispatch import Dispatch
from cotrain_store.oplog.moves import QUIET_S

log = structlog.get_logger()

#: Interval between comparisons of the loads.
LOOK_S = 1.0
#: Minimum difference of work between two workers: two clock periods; MEMORY_S has about six.
DIFFERENCE_S = 20.0
#: Minimum duration of that difference.
LASTS_S = 20.0
#: Pause after moves, until the measured loads reflect them.
REST_S = MEMORY_S
#: A move that takes longer is cancelled, and its run stays on its worker.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Load:
    """Work of one worker, in seconds."""

    worker: WorkerId
    seconds: float  # total work
    training_s: float  # training part of it; sampling stays on the worker when runs move
    tokens_of: Mapping[RunId, float]  # recent tokens of its runs


def load_of(worker: WorkerHeartbeat, queued_tokens: float, tokens_of: Mapping[RunId, float]) -> Load:
    """Return the load of a worker: its work of the last minute, and its pending work."""
    busy_s = MEMORY_S * min(worker.busy, 1.0)
    sampling_s = MEMORY_S * worker.duty.get("sample", 0.0)
    waiting_s = queued_tokens / max(worker.tokens_per_s, 1.0)
    return Load(worker.id, busy_s + waiting_s, max(0.0, busy_s - sampling_s) + waiting_s, tokens_of)


@dataclass
class Balance:
    """Imbalance of the workers of a pool: its start, and the time of the last moves."""

    _differ_since: float | None = None
    _moved_at: float | None = None

    def moves(
        self, loads: Sequence[Load], now: float, resting: Container[RunId] = frozenset()
    ) -> list[tuple[RunId, WorkerId]]:
        """Return the moves to start now; `resting` runs moved within the last ten minutes and stay."""
        if self._moved_at is not None and 0 <= now - self._moved_at < REST_S:
            return []
        seconds = [load.seconds for load in loads]
        if len(loads) < 2 or max(seconds) - min(seconds) < DIFFERENCE_S:
            self._differ_since = None
            return []
        if self._differ_since is None or now < self._differ_since:
            self._differ_since = now
        if now - self._differ_since < LASTS_S:
            return []
        found = levelled(loads, resting)
        if found:
            self._differ_since, self._moved_at = None, now
        return found


def levelled(loads: Sequence[Load], resting: Container[RunId]) -> list[tuple[RunId, WorkerId]]:
    """Return moves from the most to the least loaded worker, largest fitting run first, until balanced."""
    seconds = {load.worker: load.seconds for load in loads}
    parts = {load.worker: _parts(load, resting) for load in loads}
    found: list[tuple[RunId, WorkerId]] = []
    while True:
        hot = max(seconds, key=lambda name: (seconds[name], name))
        cold = min(seconds, key=lambda name: (seconds[name], name))
        gap = seconds[hot] - seconds[cold]
        # Half the gap balances both. The larger load must shrink by more than the error of a run's share.
        fitting = [(part, run) for run, part in parts[hot].items() if 0 < part <= gap / 2]
        if gap < DIFFERENCE_S or not fitting:
            return found
        part, run = max(fitting)
        del parts[hot][run]  # each run moves at most once
        seconds[hot] -= part
        seconds[cold] += part
        found.append((run, cold))


def _parts(load: Load, resting: Container[RunId]) -> dict[RunId, float]:
    """Return the training seconds of each run of a worker, without the resting ones."""
    total = sum(load.tokens_of.values())
    return {
        run: load.training_s * tokens / total for run, tokens in load.tokens_of.items() if total and run not in resting
    }


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
        self, wanted: Sequence[Move], workers: Sequence[WorkerHeartbeat], queue: PoolQueue, now: float
    ) -> frozenset[RunId]:
        """Return the runs that are being moved, including new moves; nothing is planned for them. Raises Fenced: a
        newer scheduler leads.
        """
        if len(workers) < 2:  # no move is possible
            self._since.clear()
            return frozenset()
        self._since = {move.run: self._since.get(move.run, now) for move in wanted}
        moving = {move.run for move in wanted if await self._is_under_way(move, workers, now)}
        if not wanted and not 0 <= now - self._looked_at < LOOK_S:
            self._looked_at = now
            moving |= await self._even_out(workers, queue, now)
        return frozenset(moving)

    async def _is_under_way(self, move: Move, workers: Sequence[WorkerHeartbeat], now: float) -> bool:
        serving = {worker.id for worker in workers}
        if {move.owner, move.to} <= serving and now - self._since[move.run] < PATIENCE_S:
            return True
        await self._dispatch.moves.deregister(self._pool, move.run)
        log.warning("move_given_up", pool=self._pool, run=move.run, to=move.to)
        return False

    async def _even_out(self, workers: Sequence[WorkerHeartbeat], queue: PoolQueue, now: float) -> set[RunId]:
        self._moved = {run: at for run, at in self._moved.items() if 0 <= now - at < QUIET_S}
        loads = [
            load_of(worker, queue.waiting_tokens(worker.id), queue.recent.runs_of(worker.id, now))
            for worker in workers
            if worker.state == "serving"
        ]
        moving = set()
        for run, to in self._balance.moves(loads, now, self._moved):
            self._moved[run] = now
            if await self._dispatch.ask_move(self._pool, run, to):
                moving.add(run)
                queue.recent.settle(run, to, now)
                log.info("move_asked", pool=self._pool, run=run, to=to)
        return moving
