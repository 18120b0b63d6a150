"""Messages to a client about a gap: a seq that never arrived, and the requests that wait behind it."""

import math

from cotrain_store import redis_keys
from cotrain_store.messages.ids import PoolId, RunId
from cotrain_store.redis_client.connection import Connection


async def client_seq(connection: Connection, pool: PoolId, run: RunId, log_seq: int) -> int:
    """Return the client's seq for a seq of the log: the client does not count unnumbered ops."""
    unnumbered = await connection.zrange(redis_keys.unnumbered_ops(pool, run), 0, -1)
    return log_seq - sum(int(op) < log_seq for op in unnumbered)


def not_yet_here(missing: int, left_s: float) -> str:
    """Return the reason why a request waits behind one that its client may still be sending."""
    return (
        f"waiting for seq_id {missing}, which has not reached the server yet; without it what waits "
        f"here fails in {math.ceil(left_s)} s"
    )


def still_waiting(missing: int, left_s: float) -> str:
    """Return the reason why a request waits, and the remedy."""
    return (
        f"waiting for seq_id {missing}, which never reached the server: its client failed before "
        "it was sent, or is not done with it. Where it failed, go on with a new training client "
        f"from the last checkpoint; what waits here fails in {math.ceil(left_s)} s (COTRAIN_GAP_LIMIT_S)"
    )


def given_up(missing: int) -> str:
    """Return the reason why a request failed, and the remedy."""
    return (
        f"seq_id {missing} of this run never reached the server: its client failed before it was "
        "sent. This request waited behind it for COTRAIN_GAP_LIMIT_S, was given up, and changed "
        "nothing; so does what is sent later. Go on with a new training client from the last "
        f"checkpoint, or send seq_id {missing}."
    )
