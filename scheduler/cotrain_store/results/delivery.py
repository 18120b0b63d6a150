"""Results that were sent: they count as unread no more, and need not lie in Redis for a day once read.

A result that was sent is not one that was read: the answer may be lost, and a laptop may sleep for a
night with its poll open. But a client that afterwards sends its run another request is awake, and it
asks again within seconds for what it missed. Sample requests have no order to tell that from: there
the session's heartbeat tells it.

Only the key that opened a session shortens the lives of its results. Another member of the tenant may read
them, and takes none away from the client that waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotrain_store.keys import result_keys, run_keys, tenant_keys
from cotrain_store.messages.ids import (
    PoolId,
    RequestId,
    RunId,
    SessionId,
    TenantId,
    run_of,
    sample_id,
    session_of,
)
from cotrain_store.messages.samples import SampleName
from cotrain_store.redis_client.connection import ANY_TROUBLE, Connection
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.redis_client.subscription import note_trouble
from cotrain_store.tenants.session_owners import THIS_SERVER, is_owner, session_owners

#: How long a client may take to ask again for an answer that was lost.
READ_AFTER_S = 600.0
#: Struck off together this often: one write for all that was sent since.
FLUSH_EVERY_S = 1.0
#: Redis does nothing else while it strikes these off.
_AT_ONCE = 1_000
_FORGET_AFTER_S = result_keys.SMALL_RESULT_TTL_MS / 1000


@dataclass
class _Sent:
    pool: PoolId
    run: RunId
    at: float
    last_seq: int | None = None
    """The run's newest request soon after the result was sent; None until it was looked up."""


class DeliveryLog:
    """What one API process has sent. Losing it costs memory, and its tenants quota until results expire."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._results_sent = async_script(connection, "results_sent")
        self._results_read = async_script(connection, "results_read")
        self._sample_read = async_script(connection, "sample_read")
        self._unflushed: list[tuple[TenantId, RequestId]] = []
        self._ops: dict[tuple[RequestId, str], _Sent] = {}
        self._samples: dict[tuple[SampleName, str], float] = {}

    def sent(
        self,
        tenant: TenantId,
        request: RequestId,
        origin: PoolId | SampleName,
        now: float,
        key_id: str = THIS_SERVER,
    ) -> None:
        """Remember that a result was sent to the client of an API key.

        `origin` is a run's pool, or a sample request's own name.
        """
        self._unflushed.append((tenant, request))
        if isinstance(origin, SampleName):
            self._samples[origin, key_id] = now
        else:
            self._ops[request, key_id] = _Sent(origin, run_of(request), now)

    async def flush(self) -> None:
        """Strike what was sent off the unread results. What Redis does not take now it gets later."""
        while self._unflushed:
            some = self._unflushed[:_AT_ONCE]
            rows = [{"tenant": tenant, "request": request} for tenant, request in some]
            try:
                await self._results_sent([], {"sent": rows})
            except ANY_TROUBLE as trouble:
                note_trouble("strike off what was sent", trouble)
                return
            del self._unflushed[: len(some)]

    async def expire_read(self, now: float) -> None:
        """Shorten the lives of results that were sent a while ago to clients that are awake since."""
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
            args = {"requests": own, "ttl_ms": result_keys.READ_RESULT_TTL_MS}
            await self._results_read([], args)

    async def _newest_seqs(self) -> dict[RunId, int | None]:
        runs = {sent.run: sent.pool for sent in self._ops.values()}
        async with self._redis.pipeline(transaction=False) as pipeline:
            for run, pool in runs.items():
                pipeline.hget(run_keys.log(pool, run), "last")
            rows = await pipeline.execute()
        return {run: None if row is None else int(row) for run, row in zip(runs, rows, strict=True)}

    async def _expire_samples(self, now: float) -> None:
        old = [sent for sent, at in self._samples.items() if now - at > READ_AFTER_S]
        if not old:
            return
        sessions = {name.session for name, _ in old}
        alive = await self._alive(sessions)
        owners = await session_owners(self._redis, alive)
        read = [
            name
            for name, key_id in old
            if name.session in alive and is_owner(key_id, owners[name.session])
        ]
        if read:
            args = {
                "requests": [sample_id(*name) for name in read],
                "ttl_ms": result_keys.READ_RESULT_TTL_MS,
                "record_ms": run_keys.SAMPLE_RECORD_EXTRA_MS,
            }
            await self._sample_read([], args)
        for sent in old:
            if sent[0].session in alive or now - self._samples[sent] > _FORGET_AFTER_S:
                del self._samples[sent]

    async def _alive(self, sessions: set[SessionId]) -> set[SessionId]:
        asked = sorted(sessions)
        heartbeats = await self._redis.mget(
            [tenant_keys.session_heartbeat(session) for session in asked]
        )
        return {session for session, at in zip(asked, heartbeats, strict=True) if at is not None}


async def max_unread(connection: Connection, most: int) -> dict[TenantId, int]:
    """Measure the results of those tenants that have the most unread."""
    names = await connection.zrange(result_keys.unread_tenants(), 0, most - 1, desc=True)
    return await unread_bytes(connection, [TenantId(name.decode()) for name in names])


async def unread_bytes(connection: Connection, tenants: Sequence[TenantId]) -> dict[TenantId, int]:
    """Measure the results of tenants that were never sent, as their quotas count them."""
    sizes = await async_script(connection, "unread_bytes")([], {"tenants": list(tenants)})
    return dict(zip(tenants, sizes, strict=True))
