"""Owners of sessions: the API key that opened one, whose client alone says which results were read."""

from collections.abc import Iterable

from cotrain_store import redis_keys
from cotrain_store.messages.ids import SessionId
from cotrain_store.redis_client.connection import Connection

#: In place of the id of a key: the server takes a result itself, for a client that waits.
THIS_SERVER = ""


async def session_owners(connection: Connection, sessions: Iterable[SessionId]) -> dict[SessionId, str]:
    """Return the id of the key that opened each session; "" where none is noted."""
    asked = sorted(sessions)
    async with connection.pipeline(transaction=False) as pipeline:
        for session in asked:
            pipeline.hget(redis_keys.session(session), "key")
        rows = await pipeline.execute()
    return {session: (row or b"").decode() for session, row in zip(asked, rows, strict=True)}


def is_owner(key_id: str, owner: str) -> bool:
    """Return whether a client of a key may end the results of a session that `owner` opened.

    Any key of the tenant may for a session without an owner, which the server opened itself.
    """
    return key_id in {THIS_SERVER, owner} or not owner
