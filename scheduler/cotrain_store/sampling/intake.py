"""The API's side of sampling: accept and cancel sample requests.

Sample requests are not part of a run's log: they change nothing, so each may run anywhere, in any
order, and again after a crash.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from cotrain_store import redis_keys
from cotrain_store.bodies.sample_body import SampleBody, encode_sample
from cotrain_store.disk.capacity import Capacity
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool, SpoolRef
from cotrain_store.disk.stored_results import CANCEL, TTL_MS
from cotrain_store.errors import Reason, Refused, SamplerNotFound, SeqConflict
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import (
    CLONE_SIZE,
    OWN_SEQS,
    RequestId,
    SamplerId,
    SessionId,
    TenantId,
    WeightsRef,
    parse_sample,
    sample_id,
)
from cotrain_store.messages.runs import SamplerRecord
from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.traces import current_traceparent
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.tenants.quotas import Quotas, QuotasOf


@dataclass(frozen=True)
class SampleSubmission:
    """Argument of `sample_submit.lua`."""

    request: RequestId
    tenant: TenantId
    session: SessionId
    sampler: SamplerId
    weights: WeightsRef  # empty for the base model alone
    clone: str
    digest: str
    size: int  # bytes of the body
    tokens: int  # maximum number of tokens of the request
    ref: str | None
    """None if its body is not stored yet. The script then only checks whether it would accept the request."""
    segment: str | None  # spool segment of the body; None if the body is an argument of the script
    accepted_at: str  # time in s, as text, because it is stored unchanged
    prefix: str
    idle_ms: int
    limits: Quotas
    max_unread_bytes: int
    trace: str | None  # span of its request, as a `traceparent`, if the request is traced
    any_worker: str = redis_keys.ANY_WORKER


class SampleIntake:
    """Accepts and cancels sample requests."""

    def __init__(self, connection: Connection, spool: Spool, quotas_of: QuotasOf, disk_reserve_bytes: int = 0) -> None:
        self._quotas_of = quotas_of
        self._capacity = Capacity(connection, spool, disk_reserve_bytes)
        self._submit = async_script(connection, "sample_submit")
        self._cancel = async_script(connection, "sample_cancel")

    async def submit(self, sampler: SamplerRecord, seq: int, body: SampleBody, longest: int = 0) -> RequestId:
        """Accept one sample request; it is durable when this returns. A repeat with the same body has no effect.

        `longest` is the maximum length of a prompt and its continuation together, in tokens.

        Raises:
            SeqConflict: this seq was used with other content.
            SamplerNotFound: it has expired.
            SESSION_FINISHED: its session has ended.
            SAMPLING_BUSY, SAMPLE_TOKENS_QUEUED, UNREAD_QUOTA_REACHED, STORE_FULL, DISK_RESERVE_REACHED,
                CONNECTION_LOST:
                the request is valid; retry later.
        """
        await self._capacity.check()
        request = sample_id(sampler.id, seq)
        content = encode_sample(replace(body, policy_step=sampler.step))
        tokens = token_limit(body, longest)
        is_large, answer = len(content) > INLINE_LIMIT_BYTES, b"ROOM"
        digest = await asyncio.to_thread(_digest, content) if is_large else _digest(content)
        if is_large:  # checked first: a refused body is not worth an fsync
            answer = await self._accept(sampler, request, seq, content, digest, tokens, None)
        if answer == b"ROOM":
            with self._capacity.storing() as store:
                ref = await store(content)
                failpoint("api.before_submit", request)
                answer = await self._accept(sampler, request, seq, content, digest, tokens, ref)
                failpoint("api.after_submit", request)
        refusal = _REFUSALS.get(answer.decode())
        if refusal:
            raise refusal(seq)
        if answer == b"DUP":
            metrics.REQUESTS_DUPLICATE.inc()
        else:
            metrics.REQUESTS_ACCEPTED.labels("sample").inc()
        return request

    async def cancel(self, tenant: TenantId, request: RequestId) -> None:
        """Cancel a sample request; an unknown, foreign or finished one is not changed.

        A waiting request fails at once, a running one when its worker reads the cancellation.
        Idempotent. Raises CONNECTION_LOST: retry later.
        """
        if parse_sample(request) is None:
            return
        args = {"request": request, "tenant": tenant, "cancel": CANCEL, "lives": TTL_MS}
        await self._cancel(args)

    async def _accept(
        self,
        sampler: SamplerRecord,
        request: RequestId,
        seq: int,
        content: bytes,
        digest: str,
        tokens: int,
        ref: str | None,
    ) -> bytes:
        pool, tenant = sampler.pool, sampler.tenant
        quotas = await self._quotas_of(tenant)
        asked = SampleSubmission(
            request=request, tenant=tenant, session=sampler.session, sampler=sampler.id,
            weights=sampler.weights or WeightsRef(""), clone=_clone(seq),
            digest=digest, size=len(content), tokens=tokens, ref=ref,
            segment=SpoolRef.parse(ref).segment if ref and ref != "inline" else None,
            accepted_at=repr(time.time()), prefix=redis_keys.prefix(pool),
            idle_ms=redis_keys.sampler_idle_ms(ephemeral=sampler.ephemeral),
            limits=quotas, max_unread_bytes=self._capacity.unread_bytes(quotas.unread_bytes),
            trace=current_traceparent() or None,
        )  # fmt: skip
        answer: bytes = await self._submit(asked, content if ref == "inline" else b"")
        return answer


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def token_limit(body: SampleBody, longest: int) -> int:
    """Return the maximum tokens of a request: its prompt, and each sample up to its limit or the context length."""
    left = max(0, longest - len(body.prompt))
    each = left if body.max_tokens is None else min(left or body.max_tokens, body.max_tokens)
    return len(body.prompt) + body.num_samples * each


def _clone(seq: int) -> str:
    """Return the number of the client's copy that polls for the end; empty for the server's own requests."""
    return "" if seq >= OWN_SEQS else str(seq // CLONE_SIZE)


_REFUSALS: dict[str, Callable[[int], Exception]] = {
    "CONFLICT": lambda seq: SeqConflict(f"seq_id {seq} was already used with different content."),
    "GONE": lambda _: SamplerNotFound(),
    "FINISHED": lambda _: Refused(Reason.SESSION_FINISHED),
    "BUSY": lambda _: Refused(Reason.SAMPLING_BUSY),
    "TOKENS": lambda _: Refused(Reason.SAMPLE_TOKENS_QUEUED),
    "UNREAD": lambda _: Refused(Reason.UNREAD_QUOTA_REACHED),
    "SWEPT": lambda _: Refused(Reason.BODY_SWEPT),
}
