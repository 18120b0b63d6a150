"""Delivery of results to the clients that wait for them: polls for ended sample requests, and the log of sent results.

One poll covers all sample requests of a client. Each client (a sampler and the number of its copy) has its own list. A
cursor is a position in the list after which one caller continues. Reading removes nothing, because other callers may
read the same list. An entry is removed when its result was read, or after a day.

A sent result no longer counts as unread, and expires sooner once its client has read it. A sent result is not
necessarily a read one: the answer may be lost, and a laptop may be suspended for a night with its poll open. But a
client that afterwards sends its run another request is awake, and requests a missed result again within seconds.
Sample requests have no such order; for them the heartbeat of the session shows that the client is awake. A client of
sample requests may also acknowledge their results.

Only the key that opened a session shortens the lifetime of its results. Another member of the tenant may read them
without removing them from the waiting client.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from cotrain_store import redis_keys
from cotrain_store.messages.ids import (
    PoolId,
    RequestId,
    RunId,
    SampleName,
    SamplerId,
    SessionId,
    TenantId,
    parse_sample,
    run_of,
    sample_id,
    session_of,
)
from cotrain_store.messages.runs import SamplerRecord
from cotrain_store.redis_client.connection import (
    ANY_REDIS_ERROR,
    CONNECTION_LOST,
    ChannelSubscriber,
    Connection,
    log_redis_error,
    replies,
)
from cotrain_store.redis_client.scripts import async_script

#: Used instead of the id of a key: the server itself fetches a result for a waiting client.
THIS_SERVER = ""
#: Time in which a client may repeat its request for a lost answer.
READ_AFTER_S = 600.0
#: Interval of the writes that mark all results sent since as read.
FLUSH_EVERY_S = 1.0
#: Maximum number of results in one script call; it blocks Redis.
_AT_ONCE = 1_000
_FORGET_AFTER_S = redis_keys.SMALL_RESULT_TTL_MS / 1000
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


@dataclass
class _Sent:
    pool: PoolId
    run: RunId
    at: float
    last_seq: int | None = None
    """Newest request of the run soon after the result was sent; None before the first look-up."""


class DeliveryLog:
    """Results sent by one API process. Its loss costs memory, and quota of the tenants until the results expire."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._results_sent = async_script(connection, "results_sent")
        self._results_read = async_script(connection, "results_read")
        self._sample_read = async_script(connection, "sample_read")
        self._unflushed: list[tuple[TenantId, RequestId]] = []
        self._ops: dict[tuple[RequestId, str], _Sent] = {}
        self._samples: dict[tuple[SampleName, str], float] = {}

    def sent(
        self, tenant: TenantId, request: RequestId, origin: PoolId | SampleName, now: float, key_id: str = THIS_SERVER
    ) -> None:
        """Record that a result was sent to the client of an API key.

        `origin` is a run's pool, or a sample request's own name.
        """
        self._unflushed.append((tenant, request))
        if isinstance(origin, SampleName):
            self._samples[origin, key_id] = now
        else:
            self._ops[request, key_id] = _Sent(origin, run_of(request), now)

    async def flush(self) -> None:
        """Remove the sent results from the unread ones. If Redis is unavailable, they stay for a later call."""
        while self._unflushed:
            some = self._unflushed[:_AT_ONCE]
            rows = [{"tenant": tenant, "request": request} for tenant, request in some]
            try:
                await self._results_sent({"sent": rows})
            except ANY_REDIS_ERROR as error:
                log_redis_error("flush deliveries", error)
                return
            del self._unflushed[: len(some)]

    async def expire_read(self, now: float) -> None:
        """Shorten the lifetime of results sent more than READ_AFTER_S ago to clients that were active since."""
        await self._expire_ops(now)
        await self._expire_samples(now)

    async def _expire_ops(self, now: float) -> None:
        newest = await self._newest_seqs()
        read: list[tuple[RequestId, str, SessionId]] = []
        for (request, key_id), sent in list(self._ops.items()):
            last_seq = newest.get(sent.run)
            if last_seq is None or now - sent.at > _FORGET_AFTER_S:
                del self._ops[request, key_id]
            elif sent.last_seq is None:
                sent.last_seq = last_seq
            elif last_seq > sent.last_seq and now - sent.at > READ_AFTER_S:
                read.append((request, key_id, session_of(sent.run)))
                del self._ops[request, key_id]
        owners = await _session_owners(self._redis, {session for _, _, session in read})
        own = [name for name, key_id, session in read if _is_owner(key_id, owners[session])]
        if own:
            await self._results_read({"requests": own, "ttl_ms": redis_keys.READ_RESULT_TTL_MS})

    async def _newest_seqs(self) -> dict[RunId, int | None]:
        runs = {sent.run: sent.pool for sent in self._ops.values()}
        rows = await replies(self._redis, (("HGET", redis_keys.log(pool, run), "last") for run, pool in runs.items()))
        return {run: None if row is None else int(row) for run, row in zip(runs, rows, strict=True)}

    async def _expire_samples(self, now: float) -> None:
        old = [sent for sent, at in self._samples.items() if now - at > READ_AFTER_S]
        if not old:
            return
        sessions = {name.session for name, _ in old}
        alive = await self._alive(sessions)
        owners = await _session_owners(self._redis, alive)
        read = [name for name, key_id in old if name.session in alive and _is_owner(key_id, owners[name.session])]
        if read:
            await self._sample_read(_read_samples([sample_id(*name) for name in read]))
        for sent in old:
            if sent[0].session in alive or now - self._samples[sent] > _FORGET_AFTER_S:
                del self._samples[sent]

    async def _alive(self, sessions: set[SessionId]) -> set[SessionId]:
        asked = sorted(sessions)
        heartbeats = await self._redis.mget([redis_keys.session_heartbeat(session) for session in asked])
        return {session for session, at in zip(asked, heartbeats, strict=True) if at is not None}


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
        owners = await _session_owners(self._redis, [sampler.session])
        if not _is_owner(key_id, owners[sampler.session]):
            return
        named = {request: parse_sample(request) for request in requests}
        own = [request for request, name in named.items() if name and name.sampler == sampler.id]
        for start in range(0, len(own), ACKNOWLEDGED_AT_ONCE):
            await self._read(_read_samples(own[start : start + ACKNOWLEDGED_AT_ONCE]))

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


async def max_unread(connection: Connection, most: int) -> dict[TenantId, int]:
    """Return the bytes of unread results of the tenants that have the most."""
    names = await connection.zrange(redis_keys.unread_tenants(), 0, most - 1, desc=True)
    return await unread_bytes(connection, [TenantId(name.decode()) for name in names])


async def unread_bytes(connection: Connection, tenants: Sequence[TenantId]) -> dict[TenantId, int]:
    """Return the bytes of results never sent of each tenant, as counted by the quota."""
    sizes = await async_script(connection, "unread_bytes")({"tenants": list(tenants)})
    return dict(zip(tenants, sizes, strict=True))


def _read_samples(requests: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `sample_read.lua`: requests whose client has their results."""
    return {
        "requests": requests,
        "ttl_ms": redis_keys.READ_RESULT_TTL_MS,
        "record_ms": redis_keys.SAMPLE_RECORD_EXTRA_MS,
    }


async def _session_owners(connection: Connection, sessions: Iterable[SessionId]) -> dict[SessionId, str]:
    """Return the id of the key that opened each session; "" if none is recorded."""
    asked = sorted(sessions)
    rows = await replies(connection, (("HGET", redis_keys.session(session), "key") for session in asked))
    return {session: (row or b"").decode() for session, row in zip(asked, rows, strict=True)}


def _is_owner(key_id: str, owner: str) -> bool:
    """Return True if a client of a key may shorten the lifetime of results of a session that `owner` opened.

    Every key of the tenant may, if the session has no owner because the server opened it.
    """
    return key_id in {THIS_SERVER, owner} or not owner
