"""Moves of runs to another worker, and drains of workers.

The operator or the scheduler requests a move, and the owner of the run carries it out. The request is a record of the
pool. While it exists, nothing of the run is planned. The owner copies the run at its last committed op, and one script
transfers it to the other worker, which restores that copy and replays nothing.

The operator requests a drain, also as a record. The worker finishes its step, stores its saves, copies its runs and
reports in its heartbeat that nothing is left. The scheduler then removes it from its pool's list, like a worker without
a heartbeat for a long time. Each of its runs may then go to any other worker. Without another worker nothing happens. A
worker whose process must end does the same, and removes itself from the list.
"""

import json
import time
from collections.abc import Mapping

from cotrain_store import redis_keys
from cotrain_store.errors import Reason, Refused, RunClosed
from cotrain_store.messages.fleet import Move
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.redis_client.connection import Connection, SyncConnection
from cotrain_store.redis_client.scripts import async_script, sync_script, worker_args

#: No run is moved twice within this time, unless the operator requests it.
QUIET_S = 600.0


class Moves:
    """Requests for moves, by the operator or the scheduler."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._request = async_script(connection, "move_request")

    async def request(self, pool: PoolId, run: RunId, to: WorkerId) -> None:
        """Request the move of a run for the operator. Idempotent.

        Raises:
            RunClosed: the run has ended.
            WORKER_NOT_FOUND: no live worker of its pool has this id.
            CANNOT_MOVE: the run is already there, or has no worker that could hand it over.
        """
        match await self._answer(pool, run, to, {}, 0.0):
            case b"ENDED":
                raise RunClosed
            case b"TARGET":
                raise Refused(Reason.WORKER_NOT_FOUND)
            case b"THERE":
                raise Refused(Reason.CANNOT_MOVE, f"Run {run} is already on worker {to}.")
            case b"UNOWNED":
                raise Refused(Reason.CANNOT_MOVE, f"Run {run} has no worker yet. Its next request assigns one.")

    async def request_as_leader(self, pool: PoolId, run: RunId, to: WorkerId, leader: Mapping[str, str]) -> bool:
        """Request a move for the scheduler. Return False if it is impossible or the run was moved within QUIET_S.

        `leader` are the arguments that fence it. Raises Fenced: a newer scheduler leads.
        """
        return await self._answer(pool, run, to, leader, QUIET_S) == b"OK"

    async def cancel(self, pool: PoolId, run: RunId) -> None:
        """Cancel the move of a run."""
        await self._redis.hdel(redis_keys.moves(pool), run)

    async def _answer(self, pool: PoolId, run: RunId, to: WorkerId, leader: Mapping[str, str], quiet_s: float) -> bytes:
        args = {
            **leader, "prefix": redis_keys.prefix(pool), "run": run, "to": to,
            "now_ms": int(time.time() * 1000), "quiet_ms": quiet_s * 1000,
        }  # fmt: skip
        return bytes(await self._request(args))


class OwnMoves:
    """A worker's side of moves: the pending moves of its runs, and the hand-over.

    Methods that write raise Fenced if another process took over this worker id.
    """

    def __init__(self, connection: SyncConnection, pool: PoolId, worker: WorkerId) -> None:
        self._redis = connection
        self._pool = pool
        self._worker = worker
        self._move = sync_script(connection, "move")

    def wanted(self) -> list[Move]:
        """Return the moves that this worker must carry out."""
        moves = [Move.parse(*row) for row in self._redis.hgetall(redis_keys.moves(self._pool)).items()]
        return [move for move in moves if move.owner == self._worker]

    def hand_over(self, move: Move, epoch: int, *, in_memory: bool) -> bool:
        """Transfer a run to the other worker, which owns it from here on. Idempotent.

        If a run is `in_memory`, a recovery copy must hold all committed ops. A run that is not in memory needs no such
        copy: its ops would be replayed here as well. Return False if it is too early, or the move was cancelled.
        """
        args = {"run": move.run, "to": move.to, "in_memory": in_memory, "now_ms": int(time.time() * 1000)}
        args |= worker_args(self._pool, self._worker, epoch)
        return bool(self._move(args) == b"OK")


class Drains:
    """The operator's side of drains: request and withdraw. Idempotent."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def request(self, pool: PoolId, worker: WorkerId) -> None:
        """Request the drain of a worker; raises WORKER_NOT_FOUND."""
        is_known = await self._redis.sismember(redis_keys.workers(pool), worker)
        if not is_known and not await self._redis.exists(redis_keys.worker(pool, worker)):
            raise Refused(Reason.WORKER_NOT_FOUND)
        await self._redis.hsetnx(redis_keys.draining(pool), worker, f"{time.time():.3f}")
        await self._redis.publish(redis_keys.notify_worker(pool, worker), "drain")

    async def withdraw(self, pool: PoolId, worker: WorkerId) -> bool:
        """Withdraw the drain of a worker. Return False if none was requested."""
        found = await self._redis.hdel(redis_keys.draining(pool), worker)
        await self._redis.publish(redis_keys.notify_worker(pool, worker), "drain")
        return bool(found)


class OwnDrain:
    """A worker's side of its drain: the request, a successor, and the deregistration.

    `deregister` raises Fenced if another process took over this worker id.
    """

    def __init__(self, connection: SyncConnection, pool: PoolId, worker: WorkerId) -> None:
        self._redis = connection
        self._pool = pool
        self._worker = worker
        self._deregister = sync_script(connection, "deregister")

    def is_requested(self) -> bool:
        """Return True if the operator requested a drain of this worker."""
        return bool(self._redis.hexists(redis_keys.draining(self._pool), self._worker))

    def has_successor(self) -> bool:
        """Return True if another worker of this pool is alive and is neither draining nor leaving."""
        return self._successor() is not None

    def deregister(self, epoch: int) -> bool:
        """Remove this worker, whose process of that epoch ends, from its pool's list, so that its runs can go anywhere.

        Return False if no other worker could continue, or if something is open, unstored or claimed here.
        """
        successor = self._successor()
        if successor is None:
            return False
        args = {
            **worker_args(self._pool, self._worker, epoch), "seen_epoch": str(epoch), "leaves": True,
            "successor": successor, "any_worker": redis_keys.ANY_WORKER,
        }  # fmt: skip
        return bool(self._deregister(args) == b"OK")

    def _successor(self) -> WorkerId | None:
        pool = self._pool
        drained = self._redis.hkeys(redis_keys.draining(pool))
        others = self._redis.smembers(redis_keys.workers(pool)) - {*drained, self._worker.encode()}
        for worker in sorted(WorkerId(name.decode()) for name in others):
            heartbeat = self._redis.get(redis_keys.worker(pool, worker))
            if heartbeat and not json.loads(heartbeat).get("is_handing_over"):
                return worker
        return None

    def is_listed(self) -> bool:
        """Return True if this worker is on its pool's list."""
        return bool(self._redis.sismember(redis_keys.workers(self._pool), self._worker))

    def rejoin(self) -> None:
        """Add this worker to its pool's list again."""
        self._redis.sadd(redis_keys.workers(self._pool), self._worker)
