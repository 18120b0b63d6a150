"""Two workers of one pool, as tests of drains, leaving and moves look at them."""

from __future__ import annotations

import json
from typing import Any

from cotrain_store.keys import fleet_keys
from cotrain_store.messages.ids import WorkerId
from tests.support.stack import POOL

OLD, NEW = WorkerId("w0"), WorkerId("w1")
#: Requests of one step of the program.
STEP = 4


def heartbeat(redis: Any, name: WorkerId) -> dict[str, Any]:
    """Read what a worker says about itself; empty once it is gone."""
    row = redis.get(fleet_keys.worker(POOL, name))
    return json.loads(row) if row else {}


def is_listed(redis: Any, name: WorkerId) -> bool:
    """Tell whether a worker is on its pool's list."""
    return bool(redis.sismember(fleet_keys.workers(POOL), name))
