"""Runs that are to go to another worker: asked for by the operator or the scheduler, done by the run's owner.

The wish is a record of the pool. While it stands nothing of the run is planned; its owner copies it out at its last
committed op, and one script gives it to the other worker, which restores that copy and replays nothing.

Workers whose runs are to go elsewhere: asked for, noticed by the worker, carried out by the scheduler.

The operator's request is a record. The worker finds it, finishes its step, stores its saves, copies its runs out, and
says in its heartbeat that nothing is left; then the scheduler strikes it off its pool's list, as it does with one that
is dead for long, and each of its runs goes to any other worker. Without another worker nothing happens. A worker
whose process is to end does the same, and strikes itself off.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from cotrain_store.errors import CannotMove, Fenced, RunClosed, WorkerNotFound
from cotrain_store.keys import fleet_keys, run_keys
from cotrain_store.messages.ids import PoolId, RunId, WorkerId
from cotrain_store.redis_client.connection import Connection, SyncConnection
from cotrain_store.redis_client.scripts import async_script, sync_script

#: No run is moved twice within this time, unless the operator asks for it.
QUIET_S = 600.0


@dataclass(frozen=True)
class Move:
    """Where a run is to go."""

    run: RunId
    owner: WorkerId
    to: WorkerId


class Moves:
    """The asking side."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._ask = async_script(connection, "move_ask")

    async def wanted(self, pool: PoolId) -> list[Move]:
        """List the moves that are not done yet."""
        return _parsed(await self._redis.hgetall(fleet_keys.moves(pool)))

    async def ask(self, pool: PoolId, run: RunId, to: WorkerId) -> None:
        """Have a run go to another worker, as the operator wishes. Twice is harmless.

        Raises:
            RunClosed: it has ended.
            WorkerNotFound: no living worker of its pool has this id.
            CannotMove: it is there, or has no worker that could hand it over.
        """
        match await self._answer(pool, run, to, "", 0.0):
            case b"ENDED":
                raise RunClosed
            case b"TARGET":
                raise WorkerNotFound
            case b"THERE":
                raise CannotMove(f"Run {run} is at worker {to}.")
            case b"UNOWNED":
                raise CannotMove(f"Run {run} has no worker: its next request gives it one.")

    async def request_move(
        self, pool: PoolId, run: RunId, to: WorkerId, scheduler_epoch: str
    ) -> bool:
        """Have a run go to another worker; False where that can not be, or it was moved within QUIET_S.

        Raises:
            Fenced: a newer scheduler leads.
        """
        answer = await self._answer(pool, run, to, scheduler_epoch, QUIET_S)
        if answer == b"FENCED":
            raise Fenced
        return answer == b"OK"

    async def deregister(self, pool: PoolId, run: RunId) -> None:
        """Let a run stay where it is: its move does not come about."""
        await self._redis.hdel(fleet_keys.moves(pool), run)

    async def _answer(
        self, pool: PoolId, run: RunId, to: WorkerId, scheduler_epoch: str, quiet_s: float
    ) -> bytes:
        script_keys = [
            fleet_keys.scheduler_epoch(), fleet_keys.moves(pool), fleet_keys.workers(pool),
            run_keys.log(pool, run), fleet_keys.worker(pool, to),
        ]  # fmt: skip
        args = {
            "prefix": fleet_keys.prefix(pool), "run": run, "to": to,
            "now_ms": int(time.time() * 1000), "quiet_ms": quiet_s * 1000,
            **({"epoch": scheduler_epoch} if scheduler_epoch else {}),
        }  # fmt: skip
        return bytes(await self._ask(script_keys, args))


class OwnMoves:
    """A worker's side: which of its runs are to go, and the handing over."""

    def __init__(self, connection: SyncConnection, pool: PoolId, worker: WorkerId) -> None:
        self._redis = connection
        self._pool = pool
        self._worker = worker
        self._move = sync_script(connection, "move")

    def wanted(self) -> list[Move]:
        """List the runs that this worker is to hand over."""
        moves = _parsed(self._redis.hgetall(fleet_keys.moves(self._pool)))
        return [move for move in moves if move.owner == self._worker]

    def hand_over(self, move: Move, epoch: int, *, in_memory: bool) -> bool:
        """Give a run to the other worker; from here on it is that one's. Twice is harmless.

        Of a run that is `in_memory` a recovery copy has to hold all that is committed; what is not would be
        replayed here as well. False where it is too early, or the move is not wanted any more.

        Raises:
            Fenced: another process took this worker's place.
        """
        pool = self._pool
        script_keys = [
            fleet_keys.worker_epoch(pool, self._worker), fleet_keys.moves(pool),
            fleet_keys.workers(pool), run_keys.log(pool, move.run), fleet_keys.worker(pool, move.to),
            fleet_keys.counters(pool), fleet_keys.notify_scheduler(),
        ]  # fmt: skip
        args = {
            "epoch": str(epoch), "prefix": fleet_keys.prefix(pool), "run": move.run,
            "worker": self._worker, "to": move.to, "in_memory": in_memory,
            "now_ms": int(time.time() * 1000),
        }  # fmt: skip
        answer = self._move(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"OK")


def _parsed(rows: dict[bytes, bytes]) -> list[Move]:
    moves = []
    for run, value in rows.items():
        owner, _, to = value.decode().partition(">")
        moves.append(Move(RunId(run.decode()), WorkerId(owner), WorkerId(to)))
    return moves


class Drains:
    """The operator's side: ask for it and take it back. Twice is harmless."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def ask(self, pool: PoolId, worker: WorkerId) -> None:
        """Have a worker's runs go elsewhere; raises WorkerNotFound."""
        is_known = await self._redis.sismember(fleet_keys.workers(pool), worker)
        if not is_known and not await self._redis.exists(fleet_keys.worker(pool, worker)):
            raise WorkerNotFound
        await self._redis.hsetnx(fleet_keys.draining(pool), worker, f"{time.time():.3f}")
        await self._redis.publish(fleet_keys.notify_worker(pool, worker), "drain")

    async def take_back(self, pool: PoolId, worker: WorkerId) -> bool:
        """Let a worker take runs again; False where that was not asked for."""
        found = await self._redis.hdel(fleet_keys.draining(pool), worker)
        await self._redis.publish(fleet_keys.notify_worker(pool, worker), "drain")
        return bool(found)

    async def asked(self, pool: PoolId) -> dict[WorkerId, float]:
        """List the workers of a pool that are to be drained, and since when, in s."""
        rows = await self._redis.hgetall(fleet_keys.draining(pool))
        return {WorkerId(name.decode()): float(at) for name, at in rows.items()}


class OwnDrain:
    """A worker's side: is it to be drained, and is there another one that can go on?"""

    def __init__(self, connection: SyncConnection, pool: PoolId, worker: WorkerId) -> None:
        self._redis = connection
        self._pool = pool
        self._worker = worker
        self._deregister = sync_script(connection, "deregister")

    def is_asked(self) -> bool:
        """Tell whether the operator wants this worker drained."""
        return bool(self._redis.hexists(fleet_keys.draining(self._pool), self._worker))

    def has_successor(self) -> bool:
        """Tell whether a worker of this pool is alive that is not to be drained, and does not leave, too."""
        return self._successor() is not None

    def deregister(self, epoch: int) -> bool:
        """Take this worker, whose process of that epoch ends, off its pool's list: its runs can go anywhere.

        False where no other worker could go on, or something is open, unstored or claimed here.

        Raises:
            Fenced: another process took this one's place.
        """
        pool, successor = self._pool, self._successor()
        if successor is None:
            return False
        epoch_key = fleet_keys.worker_epoch(pool, self._worker)
        script_keys = [
            epoch_key, fleet_keys.workers(pool), epoch_key, fleet_keys.draining(pool),
            fleet_keys.worker(pool, successor),
        ]  # fmt: skip
        args = {
            "epoch": str(epoch), "seen_epoch": str(epoch), "leaves": True, "prefix": fleet_keys.prefix(pool),
            "worker": self._worker, "successor": successor, "any_worker": run_keys.ANY_WORKER,
        }  # fmt: skip
        answer = self._deregister(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"OK")

    def _successor(self) -> WorkerId | None:
        pool = self._pool
        drained = self._redis.hkeys(fleet_keys.draining(pool))
        others = self._redis.smembers(fleet_keys.workers(pool)) - {*drained, self._worker.encode()}
        for worker in sorted(WorkerId(name.decode()) for name in others):
            heartbeat = self._redis.get(fleet_keys.worker(pool, worker))
            if heartbeat and not json.loads(heartbeat).get("is_handing_over"):
                return worker
        return None

    def is_listed(self) -> bool:
        """Tell whether this worker is on its pool's list."""
        return bool(self._redis.sismember(fleet_keys.workers(self._pool), self._worker))

    def rejoin(self) -> None:
        """Stand on its pool's list again."""
        self._redis.sadd(fleet_keys.workers(self._pool), self._worker)
