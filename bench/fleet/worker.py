"""Worker with a fixed token rate: it takes a step, lets virtual time pass, and commits one small result per op."""

from __future__ import annotations

import contextlib
import random

from cotrain_store.disk.spool import Spool
from cotrain_store.keys import fleet_keys
from cotrain_store.messages.fleet import WorkerHeartbeat
from cotrain_store.messages.ids import RunId, WorkerId
from cotrain_store.messages.ops import Step
from cotrain_store.messages.results import Result
from cotrain_store.messages.runs import PoolRecord
from cotrain_store.oplog.execution import Execution
from cotrain_store.redis_client.connection import SyncConnection

_DONE = Result.of_json({"type": "done"})
#: Standard deviation of the logarithm of a step's duration.
NOISE = 0.2


class RateWorker:
    """One worker id with changing processes."""

    def __init__(
        self, connection: SyncConnection, spool: Spool, pool: PoolRecord, worker: WorkerId,
        tokens_per_s: float, draw: random.Random,
    ) -> None:  # fmt: skip
        self.execution = Execution(connection, spool, spool, pool.id, worker)
        self.id = worker
        self.at_work: Step | None = None
        self.is_alive = False
        self.alive_s = self.busy_s = 0.0
        self._since = 0.0
        self._redis = connection
        self._pool = pool
        self._tokens_per_s = tokens_per_s
        self._draw = draw
        self._runs: set[str] = set()

    def enter(self, now: float) -> None:
        """Start as a new process."""
        self.execution.claim()
        self.execution.publish(self._pool)
        self.is_alive, self._since = True, now
        self.beat()

    def die(self, now: float) -> None:
        """Crash, possibly within a step. The heartbeat is removed as if it had expired."""
        self.execution.leave()
        self.alive_s += now - self._since
        self.is_alive, self.at_work = False, None
        self._runs.clear()

    def count(self, now: float) -> None:
        """Add the alive time up to now."""
        if self.is_alive:
            self.alive_s, self._since = self.alive_s + now - self._since, now

    def beat(self) -> None:
        """Send a heartbeat; its key expires in real time."""
        beat = WorkerHeartbeat(
            self.id, self.execution.epoch, "serving", "none", self._tokens_per_s, len(self._runs), 0, 0.0
        )  # fmt: skip
        self.execution.heartbeat(beat)

    def take(self) -> float | None:
        """Start the open step, if there is one; return its duration in s."""
        name = fleet_keys.open_steps(self._pool.id, self.id)
        if not self.is_alive or self.at_work or not self._redis.hlen(name):
            return None
        [self.at_work, *_] = self.execution.open_steps()
        self._runs |= {op.run for op in self.at_work.ops}
        tokens = sum(max(1, op.tokens) for op in self.at_work.ops)
        return tokens / self._tokens_per_s * self._draw.lognormvariate(0.0, NOISE)

    def commit(self, lasted_s: float) -> Step:
        """Commit the step in progress."""
        step, self.at_work = self.at_work, None
        assert step
        results = {(op.run, op.seq): _DONE for op in step.ops}
        self.execution.commit(step, results, {"cycle": step.cycle, "worker": self.id}, {})
        self.busy_s += lasted_s
        return step

    def hand_over(self) -> list[RunId]:
        """Hand runs with pending moves over to the other worker, without a copy; return their ids."""
        if not self.is_alive or self.at_work:
            return []
        epoch, moves = self.execution.epoch, self.execution.moves
        gone = [m.run for m in moves.wanted() if moves.hand_over(m, epoch, in_memory=False)]
        self._runs -= set(gone)
        return gone

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self.execution.leave()
