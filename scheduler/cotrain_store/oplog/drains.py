"""Workers whose runs are to go elsewhere: asked for, noticed by the worker, carried out by the scheduler.

The operator's request is a record. The worker finds it, finishes its step, stores its saves, copies its runs out, and
says in its heartbeat that nothing is left; then the scheduler strikes it off its pool's list, as it does with one that
is dead for long, and each of its runs goes to any other worker. Without another worker nothing happens.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cotrain_store.errors import WorkerNotFound
from cotrain_store.keys import fleet_keys
from cotrain_store.messages.ids import PoolId, WorkerId

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

    def is_asked(self) -> bool:
        """Tell whether the operator wants this worker drained."""
        return bool(self._redis.hexists(fleet_keys.draining(self._pool), self._worker))

    def has_successor(self) -> bool:
        """Tell whether a worker of this pool is alive that is not to be drained, too."""
        pool = self._pool
        drained = self._redis.hkeys(fleet_keys.draining(pool))
        others = self._redis.smembers(fleet_keys.workers(pool)) - set(drained)
        return any(
            self._redis.exists(fleet_keys.worker(pool, WorkerId(name.decode())))
            for name in others - {self._worker.encode()}
        )

    def is_listed(self) -> bool:
        """Tell whether this worker is on its pool's list."""
        return bool(self._redis.sismember(fleet_keys.workers(self._pool), self._worker))

    def rejoin(self) -> None:
        """Stand on its pool's list again."""
        self._redis.sadd(fleet_keys.workers(self._pool), self._worker)
