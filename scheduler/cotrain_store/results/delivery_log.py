"""Log of the results that one API process has sent, and the results that their clients have read.

A sent result no longer counts as unread, and expires sooner once its client has read it. Sent is not read: the answer
may be lost, and a laptop may be suspended for a night with its poll open. But a client that afterwards sends its run
another request is awake, and requests a missed result again within seconds. Sample requests have no such order; the
heartbeat of their session shows that the client is awake.

Only the key that opened a session shortens the lifetime of its results. Another member of the tenant may read them
without removing them from the waiting client.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cotrain_store import redis_keys
from cotrain_store.messages.ids import (
    PoolId,
    RequestId,
    RunId,
    SampleName,
    SessionId,
    TenantId,
    run_of,
    sample_id,
    session_of,
)
from cotrain_store.redis_client.connection import ANY_REDIS_ERROR, Connection, log_redis_error, replies
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
        owners = await session_owners(self._redis, {session for _, _, session in read})
        own = [name for name, key_id, session in read if is_owner(key_id, owners[session])]
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
        alive = await self._with_heartbeat(sessions)
        owners = await session_owners(self._redis, alive)
        read = [name for name, key_id in old if name.session in alive and is_owner(key_id, owners[name.session])]
        if read:
            await self._sample_read(read_samples([sample_id(*name) for name in read]))
        for sent in old:
            if sent[0].session in alive or now - self._samples[sent] > _FORGET_AFTER_S:
                del self._samples[sent]

    async def _with_heartbeat(self, sessions: set[SessionId]) -> set[SessionId]:
        asked = sorted(sessions)
        heartbeats = await self._redis.mget([redis_keys.session_heartbeat(session) for session in asked])
        return {session for session, at in zip(asked, heartbeats, strict=True) if at is not None}


async def largest_unread_bytes(connection: Connection, count: int) -> dict[TenantId, int]:
    """Return the bytes of unread results of the tenants that have the most."""
    names = await connection.zrange(redis_keys.unread_tenants(), 0, count - 1, desc=True)
    return await unread_bytes(connection, [TenantId(name.decode()) for name in names])


async def unread_bytes(connection: Connection, tenants: Sequence[TenantId]) -> dict[TenantId, int]:
    """Return the bytes of results never sent of each tenant, as counted by the quota."""
    sizes = await async_script(connection, "unread_bytes")({"tenants": list(tenants)})
    return dict(zip(tenants, sizes, strict=True))


def read_samples(requests: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `sample_read.lua`: requests whose client has their results."""
    return {
        "requests": requests,
        "ttl_ms": redis_keys.READ_RESULT_TTL_MS,
        "record_ms": redis_keys.SAMPLE_RECORD_EXTRA_MS,
    }


async def session_owners(connection: Connection, sessions: Iterable[SessionId]) -> dict[SessionId, str]:
    """Return the id of the key that opened each session; "" if none is recorded."""
    asked = sorted(sessions)
    rows = await replies(connection, (("HGET", redis_keys.session(session), "key") for session in asked))
    return {session: (row or b"").decode() for session, row in zip(asked, rows, strict=True)}


def is_owner(key_id: str, owner: str) -> bool:
    """Return True if a client of a key may shorten the lifetime of results of a session that `owner` opened.

    Every key of the tenant may, if the session has no owner because the server opened it.
    """
    return key_id in {THIS_SERVER, owner} or not owner
