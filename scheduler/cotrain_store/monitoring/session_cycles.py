"""The cycles that one session's runs took part in, out of those whose records are kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cotrain_store.keys import fleet_keys

if TYPE_CHECKING:
    from cotrain_store.messages.ids import PoolId, SessionId
    from cotrain_store.redis_client.connection import Connection

#: Records of a full pool have some 10 KB each, and Redis does nothing else while it sends them.
READ_AT_ONCE = 50


async def session_cycles(
    connection: Connection, pool: PoolId, session: SessionId
) -> list[dict[str, Any]]:
    """Read a pool's cycle records with a run of this session, oldest first; `runs` holds only its own.

    The others are not even decoded. A record that moves on while this reads is read twice, and kept once.
    """
    found: dict[int, dict[str, Any]] = {}
    for first in range(0, fleet_keys.CYCLES_KEPT, READ_AT_ONCE):
        rows = await connection.lrange(fleet_keys.cycles(pool), first, first + READ_AT_ONCE - 1)
        for row in rows:
            if session.encode() in row:
                record = json.loads(row)
                record["runs"] = [run for run in record["runs"] if _is_of(session, run["run"])]
                found[record["cycle"]] = record
        if len(rows) < READ_AT_ONCE:
            break
    return [found[cycle] for cycle in sorted(found) if found[cycle]["runs"]]


def _is_of(session: SessionId, run: str) -> bool:
    return run.partition(":")[0] == session
