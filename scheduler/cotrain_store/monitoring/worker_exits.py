"""Last exit of each worker, for pages.

A worker stores its own exit, or its successor does. A supervisor of ours stores it as well, later and with the exit
status. Under systemd or Kubernetes there is no supervisor.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cotrain_store import redis_keys
from cotrain_store.messages.fleet import WorkerExit, WorkerHeartbeat
from cotrain_store.messages.ids import WorkerId, decode, encode
from cotrain_store.redis_client.connection import CONNECTION_LOST, SyncConnection, open_connection

#: Maximum characters of a stored reason.
_REASON_CHARACTERS = 500
#: Exits less than this time in s apart belong to one series.
_SERIES_S = 600.0
#: Maximum time in s that a supervisor waits for Redis before it restarts the worker.
STORE_TIMEOUT_S = 1.0
_SILENT = "It ended without a message, for example by SIGKILL or because the host had too little memory."


async def store_exit(redis_url: str, base_model: str, worker: str, last: WorkerExit) -> None:
    """Store the exit of a worker that its supervisor has seen. Without Redis it is not stored."""
    connection = open_connection(redis_url)
    key = redis_keys.worker_exits(base_model)
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            await connection.hset(key, worker, encode(last))
            await connection.expire(key, redis_keys.EXITS_TTL_S)
    except (TimeoutError, *CONNECTION_LOST):
        pass
    finally:
        await connection.aclose()


@contextmanager
def recorded_exit(connection: SyncConnection, base_model: str, worker: WorkerId) -> Iterator[None]:
    """Store an exception of the block as the worker's last exit, and raise it again."""
    try:
        yield
    except Exception as error:
        known = type(error).__module__.startswith("cotrain")
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        with suppress(*CONNECTION_LOST):
            _store(connection, base_model, worker, reason, time.time())
        raise


def record_silent_exit(
    connection: SyncConnection, base_model: str, worker: WorkerId, predecessor: WorkerHeartbeat | None
) -> None:
    """Store the exit of a predecessor that left its heartbeat behind, unless its exit is stored."""
    if predecessor is None:
        return
    last = _last(connection, base_model, worker)
    if last is None or last.at < predecessor.seen_at:
        _store(connection, base_model, worker, _SILENT, time.time())


def _last(connection: SyncConnection, base_model: str, worker: WorkerId) -> WorkerExit | None:
    text = connection.hget(redis_keys.worker_exits(base_model), worker)
    return decode(WorkerExit, json.loads(text)) if text else None


def _store(connection: SyncConnection, base_model: str, worker: WorkerId, reason: str, now_s: float) -> None:
    last, key = _last(connection, base_model, worker), redis_keys.worker_exits(base_model)
    since = last.since if last and now_s - last.at < _SERIES_S else now_s
    made = WorkerExit(now_s, last.count + 1 if last else 1, reason[:_REASON_CHARACTERS], since)
    connection.hset(key, worker, encode(made))
    connection.expire(key, redis_keys.EXITS_TTL_S)
