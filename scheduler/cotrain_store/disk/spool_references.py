"""What refers to the segments of the spool, and which of them take no references any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotrain_store.keys import result_keys
from cotrain_store.redis_client.scripts import sync_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.redis_client.connection import SyncConnection

_AT_ONCE = 500


class SpoolReferences:
    """The counts in Redis, as one worker that sweeps sees them."""

    def __init__(self, connection: SyncConnection) -> None:
        self._redis = connection
        self._sweep = sync_script(connection, "spool_sweep")

    def referenced(self) -> set[str]:
        """Name the segments that some op or result still needs."""
        counts = (result_keys.spool_segment_refs(), result_keys.spool_results())
        return {name.decode() for count in counts for name in self._redis.hkeys(count)}

    def close(self, segments: Sequence[str]) -> list[str]:
        """Let segments take no references from now on; return those without any, to be removed.

        A process that stood still between writing a body and having it accepted hears then that it has to
        be sent again; a worker writes its results again.
        """
        script_keys = [result_keys.spool_segment_refs(), result_keys.spool_results()]
        closed: list[str] = []
        for start in range(0, len(segments), _AT_ONCE):
            some = segments[start : start + _AT_ONCE]
            args = {"segments": list(some), "ttl_ms": result_keys.SWEPT_TTL_MS}
            closed += [name.decode() for name in self._sweep(script_keys, args)]
        return closed
