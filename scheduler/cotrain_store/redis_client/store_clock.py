"""What time it is for the store: a time of day once, and since then counted by the scheduler that leads.

It does not go on while nothing runs, and never jumps, as the host's and Redis' own do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cotrain_store.keys import age_keys

if TYPE_CHECKING:
    from cotrain_store.redis_client.connection import Connection


async def clock_ms(connection: Connection) -> int:
    """Read the store's clock, in ms. Before the first scheduler it is the host's."""
    return parse_ms(await connection.get(age_keys.clock()))


def parse_ms(value: bytes | None) -> int:
    """Read the value of `age_keys.clock`."""
    return int(time.time() * 1000) if value is None else int(value)
