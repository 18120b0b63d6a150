"""Results that were surely read: they need not lie in Redis for a day.

A result that was sent is not one that was read: the answer may be lost, and a laptop may sleep for a
night with its poll open. But a client that afterwards sends its run another request is awake, and it
asks again within seconds for what it missed. Sample requests have no order to tell that from: there
the session's heartbeat tells it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_store.keys import result_keys, run_keys, sample_keys, tenant_keys
from cotrain_store.messages.ids import sample_id
from cotrain_store.redis_client.connection import ANY_TROUBLE
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.redis_client.subscription import note_trouble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cotrain_store.messages.ids import PoolId, RequestId, RunId, SessionId, TenantId
    from cotrain_store.messages.sample_ids import SampleName
    from cotrain_store.redis_client.connection import Connection

#: How long a client may take to ask again for an answer that was lost.
READ_AFTER_S = 600.0
#: Published together this often: one write for all that was sent since.
TELL_EVERY_S = 1.0
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


class Deliveries:
    """What one API process has sent, until the client gave a sign of life. Losing it costs memory only."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._read = async_script(connection, "results_read")
        self._sent: dict[RequestId, _Sent] = {}

    def note(self, pool: PoolId, run: RunId, request: RequestId, now: float) -> None:
        """Remember that a result was sent."""
        self._sent[request] = _Sent(pool, run, now)

    async def expire_read(self, now: float) -> None:
        """Shorten the lives of results that were sent a while ago to clients that went on since."""
        newest = await self._newest_seqs()
        read = []
        for request, sent in list(self._sent.items()):
            last_seq = newest.get(sent.run)
            if last_seq is None or now - sent.at > _FORGET_AFTER_S:
                del self._sent[request]
            elif sent.last_seq is None:
                sent.last_seq = last_seq
            elif last_seq > sent.last_seq and now - sent.at > READ_AFTER_S:
                read.append(request)
                del self._sent[request]
        if read:
            await self._read([], {"requests": read, "ttl_ms": result_keys.READ_RESULT_TTL_MS})

    async def _newest_seqs(self) -> dict[RunId, int | None]:
        runs = {sent.run: sent.pool for sent in self._sent.values()}
        async with self._redis.pipeline(transaction=False) as pipeline:
            for run, pool in runs.items():
                pipeline.hget(run_keys.log(pool, run), "last")
            rows = await pipeline.execute()
        return {run: None if row is None else int(row) for run, row in zip(runs, rows, strict=True)}


class SampleDeliveries:
    """Like Deliveries, for sample requests; those of clients that acknowledge need it least."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._read = async_script(connection, "sample_read")
        self._sent_at: dict[SampleName, float] = {}

    def note(self, name: SampleName, now: float) -> None:
        """Remember that a result was sent."""
        self._sent_at[name] = now

    async def expire_read(self, now: float) -> None:
        """Shorten the lives of results that were sent a while ago to sessions that are alive."""
        old = [name for name, at in self._sent_at.items() if now - at > READ_AFTER_S]
        if not old:
            return
        alive = await self._alive({name.session for name in old})
        read = [name for name in old if name.session in alive]
        if read:
            requests = [sample_id(*name) for name in read]
            args = {
                "requests": requests,
                "ttl_ms": result_keys.READ_RESULT_TTL_MS,
                "record_ms": sample_keys.SAMPLE_RECORD_EXTRA_MS,
            }
            await self._read([], args)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in read:  # nor need anybody be told that it ended
                pipeline.zrem(sample_keys.completions(name.sampler, name.clone), name.seq)
            await pipeline.execute()
        for name in old:
            if name.session in alive or now - self._sent_at[name] > _FORGET_AFTER_S:
                del self._sent_at[name]

    async def _alive(self, sessions: set[SessionId]) -> set[SessionId]:
        asked = sorted(sessions)
        beats = await self._redis.mget(
            [tenant_keys.session_heartbeat(session) for session in asked]
        )
        return {session for session, beat in zip(asked, beats, strict=True) if beat is not None}


class Unread:
    """What one API process has sent and not yet told. Losing it costs its tenants room until it expires."""

    def __init__(self, connection: Connection) -> None:
        self._sent: list[tuple[TenantId, RequestId]] = []
        self._script = async_script(connection, "results_sent")

    def note_sent(self, tenant: TenantId, request: RequestId) -> None:
        """Remember that a result was sent."""
        self._sent.append((tenant, request))

    async def tell(self) -> None:
        """Strike off what was sent. What Redis does not take now it is told later."""
        while self._sent:
            some = self._sent[:_AT_ONCE]
            try:
                await self._script(
                    [],
                    {"sent": [{"tenant": tenant, "request": request} for tenant, request in some]},
                )
            except ANY_TROUBLE as trouble:
                note_trouble("tell what was sent", trouble)
                return
            del self._sent[: len(some)]

    async def keep_telling(self) -> None:
        """Tell for ever."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            await self.tell()


async def unread_bytes(connection: Connection, tenants: Sequence[TenantId]) -> dict[TenantId, int]:
    """Measure the results of tenants that were never sent, as their quotas count them."""
    sizes = await async_script(connection, "unread_bytes")([], {"tenants": list(tenants)})
    return dict(zip(tenants, sizes, strict=True))
