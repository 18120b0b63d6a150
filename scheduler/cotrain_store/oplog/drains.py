"""Workers whose runs are to go elsewhere: asked for, noticed by the worker, carried out by the scheduler.

The operator's request is a record. The worker finds it, finishes its step, stores its saves, copies its runs out, and
says in its heartbeat that nothing is left; then the scheduler strikes it off its pool's list, as it does with one that
is dead for long, and each of its runs goes to any other worker. Without another worker nothing happens. A worker
whose process is to end does the same, and strikes itself off.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from cotrain_store.errors import Fenced, WorkerNotFound
from cotrain_store.keys import fleet_keys, sample_keys
from cotrain_store.messages.ids import PoolId, WorkerId
from cotrain_store.redis_client.scripts import sync_script

if TYPE_CHECKING:
    from cotrain_store.redis_client.connection import Connection, SyncConnection


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
        self._strike_off = sync_script(connection, "strike_off")

    def is_asked(self) -> bool:
        """Tell whether the operator wants this worker drained."""
        return bool(self._redis.hexists(fleet_keys.draining(self._pool), self._worker))

    def has_successor(self) -> bool:
        """Tell whether a worker of this pool is alive that is not to be drained, and does not leave, too."""
        return self._successor() is not None

    def strike_off(self, epoch: int) -> bool:
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
            "worker": self._worker, "successor": successor, "any_worker": sample_keys.ANY_WORKER,
        }  # fmt: skip
        answer = self._strike_off(script_keys, args)
        if answer == b"FENCED":
            raise Fenced
        return bool(answer == b"OK")

    def _successor(self) -> WorkerId | None:
        pool = self._pool
        drained = self._redis.hkeys(fleet_keys.draining(pool))
        others = self._redis.smembers(fleet_keys.workers(pool)) - {*drained, self._worker.encode()}
        for worker in sorted(WorkerId(name.decode()) for name in others):
            heartbeat = self._redis.get(fleet_keys.worker(pool, worker))
            if heartbeat and not json.loads(heartbeat).get("hands_over"):
                return worker
        return None

    def is_listed(self) -> bool:
        """Tell whether this worker is on its pool's list."""
        return bool(self._redis.sismember(fleet_keys.workers(self._pool), self._worker))

    def rejoin(self) -> None:
        """Stand on its pool's list again."""
        self._redis.sadd(fleet_keys.workers(self._pool), self._worker)
