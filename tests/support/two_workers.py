"""Two workers of one pool, for tests of drains, departures and moves."""

from __future__ import annotations

import json
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.messages.ids import WorkerId
from tests.support.stack import POOL

OLD, NEW = WorkerId("w0"), WorkerId("w1")
#: Requests of one step of the program.
STEP = 4


def heartbeat(redis: Any, name: WorkerId) -> dict[str, Any]:
    """Return the heartbeat of a worker, or an empty dict if it has none."""
    row = redis.get(redis_keys.worker(POOL, name))
    return json.loads(row) if row else {}


def is_listed(redis: Any, name: WorkerId) -> bool:
    """Return True if a worker is registered in its pool."""
    return bool(redis.sismember(redis_keys.workers(POOL), name))
