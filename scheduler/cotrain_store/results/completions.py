"""Polls for the ended sample requests of a client: one poll covers all of them.

Each client (a sampler and the number of its copy) has its own list. A cursor is a position in the list after which one
caller continues. Reading removes nothing, because other callers may read the same list. An entry is removed when its
result was read, or after a day.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.messages.ids import RequestId, SamplerId, parse_sample, sample_id
from cotrain_store.messages.runs import SamplerRecord
from cotrain_store.redis_client.connection import CONNECTION_LOST, ChannelSubscriber, Connection, replies
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.results.delivery_log import THIS_SERVER, is_owner, read_samples, session_owners

#: Duration of a poll without a timeout.
HOLD_S = 30.0
#: Interval of the checks without a wake-up, which can be lost.
SWEEP_S = 5.0
#: Maximum number of entries in one answer; the next poll returns the rest.
ENTRIES_AT_ONCE = 1_000
#: Results in one script call, which blocks Redis for half a millisecond.
ACKNOWLEDGED_AT_ONCE = 100
#: Largest exact score of a sorted set.
_LARGEST = 2**53


@dataclass(frozen=True)
class Completion:
    """One sample request that has ended."""

    request: RequestId
    failed: bool
    size: int  # bytes of its result; 0 if unknown


class Completions(ChannelSubscriber):
    """Polls for many requests at once, in one API process."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._read = async_script(connection, "sample_read")
        self._waiters: defaultdict[tuple[SamplerId, int], set[asyncio.Event]] = defaultdict(set)
        super().__init__(connection, redis_keys.notify_results(), self._receive)
        self._released = False

    @override
    async def __aexit__(self, *_: object) -> None:
        """Stop listening; polls that still wait are answered."""
        self.release_all()
        await super().__aexit__()

    @property
    def waiters(self) -> int:
        """Number of polls held open in this process."""
        return sum(len(waiting) for waiting in self._waiters.values())

    def release_all(self) -> None:
        """Answer every poll now, and later ones at once: this process is draining."""
        self._released = True
        self._wake(list(self._waiters))

    async def wait(
        self, sampler: SamplerRecord, clone: int, after: int, timeout_s: float | None
    ) -> tuple[list[Completion], int]:
        """Wait until a request ended after the cursor `after`, at most `timeout_s` (HOLD_S).

        Return the ended requests, oldest first, and the cursor after them. A call changes nothing.
        An unavailable Redis is a pause, never an error.
        """
        deadline = time.monotonic() + (HOLD_S if timeout_s is None else timeout_s)
        while True:
            with self._waiting(sampler.id, clone) as woken:  # register first, then read
                with contextlib.suppress(*CONNECTION_LOST):
                    ended, cursor = await self._ended(sampler.id, clone, after)
                    if ended:
                        return ended, cursor
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._released:
                    return [], after
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), min(left_s, SWEEP_S))

    async def acknowledge(self, sampler: SamplerRecord, requests: Iterable[str], key_id: str = THIS_SERVER) -> None:
        """Shorten the lifetime of results that the client of an API key has received.

        Ids of other samplers are ignored, and all ids if another key opened the session.
        """
        owners = await session_owners(self._redis, [sampler.session])
        if not is_owner(key_id, owners[sampler.session]):
            return
        named = {request: parse_sample(request) for request in requests}
        own = [request for request, name in named.items() if name and name.sampler == sampler.id]
        for start in range(0, len(own), ACKNOWLEDGED_AT_ONCE):
            await self._read(read_samples(own[start : start + ACKNOWLEDGED_AT_ONCE]))

    async def _ended(self, sampler: SamplerId, clone: int, after: int) -> tuple[list[Completion], int]:
        name, read = redis_keys.completions(sampler, clone), min(after, _LARGEST)
        rows = await self._redis.zrangebyscore(name, f"({read}", "+inf", start=0, num=ENTRIES_AT_ONCE, withscores=True)
        requests = [sample_id(sampler, int(seq)) for seq, _ in rows]
        facts = await replies(self._redis, (("HMGET", redis_keys.sample(each), "failed", "size") for each in requests))
        ended = [
            Completion(request, failed == b"1", int(size or 0))
            for request, (failed, size) in zip(requests, facts, strict=True)
        ]
        return ended, int(rows[-1][1]) if rows else after

    @contextlib.contextmanager
    def _waiting(self, sampler: SamplerId, clone: int) -> Iterator[asyncio.Event]:
        woken, waiting = asyncio.Event(), self._waiters[sampler, clone]
        waiting.add(woken)
        try:
            yield woken
        finally:
            waiting.discard(woken)
            if not waiting:
                del self._waiters[sampler, clone]

    async def _receive(self, message: bytes | None) -> None:
        if message is None:
            self._wake(list(self._waiters))
            return
        for request in message.decode().split("\n"):
            name = parse_sample(request)
            if name:
                self._wake([(name.sampler, name.clone)])

    def _wake(self, clients: Iterable[tuple[SamplerId, int]]) -> None:
        for client in clients:
            for woken in self._waiters.get(client, ()):
                woken.set()
