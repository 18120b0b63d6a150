"""Accept requests: the API's side of the log.

When `submit` returns, the op is durable and its future will resolve. Calling it again with the same
content gives the same request id and runs nothing twice.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cotrain_store.disk.capacity import Capacity
from cotrain_store.disk.result_storage import UNLOADED
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, SpoolRef
from cotrain_store.errors import (
    QueueFull,
    RecordQuotaReached,
    RunClosed,
    RunFailed,
    RunNotFound,
    RunQuotaReached,
    SamplerQuotaReached,
    SeqConflict,
    SeqTooFar,
    StoreUnavailable,
    UnreadQuotaReached,
    WeightsGone,
)
from cotrain_store.failpoints import failpoint
from cotrain_store.keys import fleet_keys, result_keys, run_keys, sample_keys, tenant_keys
from cotrain_store.messages.encoding import encode
from cotrain_store.messages.ids import RequestId, request_id
from cotrain_store.messages.ops import OpKind, QueuedOp
from cotrain_store.messages.results import Result
from cotrain_store.messages.runs import RunRecord, RunState
from cotrain_store.monitoring import metrics
from cotrain_store.redis_client.connection import CONNECTION_LOST, async_script

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cotrain_store.disk.capacity import Place
    from cotrain_store.disk.spool import Spool
    from cotrain_store.messages.ids import SamplerId, WeightsRef
    from cotrain_store.redis_client.connection import Connection

#: A seq further ahead of the last committed one than this is a client's mistake.
MAX_SEQ_GAP = 1_024
#: A sampler that was asked within this time makes no room for another.
SAMPLER_REST_MS = 30 * 60 * 1000
#: Where in the arguments of `submit.lua` stands what becomes of the body: envelope, body, segment.
_PLACED = slice(4, 7)


@dataclass(frozen=True)
class TenantLimits:
    """What one tenant may have waiting in one pool, and how many live runs it may have."""

    ops: int = 512
    tokens: int = 8_000_000
    bytes: int = 1_000_000_000
    runs: int = 1_000
    unread_bytes: int = 2_000_000_000
    """Of results that were never fetched, in all pools."""
    samplers: int = 10_000
    """In all pools, those of saves that wait with them."""
    sampler_bytes: int = 100_000_000_000
    """Of weights that saves without a name left. Over it, samplers at rest make room for new ones."""
    record_bytes: int = 200_000_000
    """Of records of sessions and runs, which are kept for ever."""


class Intake:
    """Create runs, accept their ops, close them."""

    def __init__(
        self,
        connection: Connection,
        spool: Spool,
        limits: TenantLimits,
        disk_reserve_bytes: int = 0,
    ) -> None:
        self._limits = limits
        self._capacity = Capacity(connection, spool, disk_reserve_bytes)
        self._submit = async_script(
            connection, "ages", "unread", "samplers", "records", "given_up", "submit"
        )
        self._close = async_script(connection, "ages", "given_up", "run_close", "close")
        self._redis = connection

    async def check_room(self) -> None:
        """Return when there is room to keep something new: a session, a sampler, a copy.

        Raises:
            StoreFull, DiskReserveReached, StoreUnavailable: later.
        """
        await self._capacity.check()

    async def create_run(
        self,
        run: RunRecord,
        *,
        kind: OpKind = OpKind.CREATE,
        body: bytes | None = None,
        digest: str = "",
        uses: Sequence[WeightsRef] = (),
        save: bytes | None = None,
    ) -> RequestId:
        """Make a run: its seq 0, by CREATE, LOAD or IMPORT. Twice with the same settings is one run.

        `body` is that of a LOAD or IMPORT. `digest` identifies what the client sent; without, that
        is the base model, the LoRA settings and the body. The weights in `uses` stay while the log
        needs the op. `save` is the body of a SAVE that becomes its seq 1: both are accepted, or
        neither is.

        Raises:
            SeqConflict: the same run id with other settings.
            WeightsGone: some of `uses` are forgotten.
            RecordQuotaReached: for good.
            RunQuotaReached, QueueFull, UnreadQuotaReached, StoreFull, DiskReserveReached,
            StoreUnavailable: later.
        """
        body = encode(run.lora).encode() if body is None else body
        digest = digest or hashlib.sha256(run.base_model.encode() + b"\0" + body).hexdigest()
        return await self._accept(
            run, 0, kind, body, 0, digest, record=encode(run), uses=uses, idempotency_key="",
            save=save,
        )  # fmt: skip

    async def submit(
        self,
        run: RunRecord,
        seq: int | None,
        kind: OpKind,
        body: bytes,
        tokens: int,
        digest: str,
        *,
        uses: Sequence[WeightsRef] = (),
        idempotency_key: str = "",
        sampler: SamplerId | None = None,
    ) -> RequestId:
        """Accept one op; durable when this returns. `digest` identifies what the client sent.

        An op without a `seq` is a rider: it runs behind all that is accepted by now, and before what
        the client sends later. Two with the same `idempotency_key` are one. The weights in `uses` stay
        while the log needs the op; a repeat does not ask whether they are still there. A save makes
        `sampler` once it runs, which counts from now on.

        Raises:
            SeqConflict: this seq, or key, was used with other content.
            WeightsGone: some of `uses` are forgotten.
            SeqTooFar: more than MAX_SEQ_GAP ops before it are missing.
            RunClosed, RunFailed, RunNotFound: the run takes no more ops.
            QueueFull, UnreadQuotaReached, SamplerQuotaReached, StoreFull, DiskReserveReached,
            StoreUnavailable: nothing is wrong; later.
        """
        return await self._accept(
            run, seq, kind, body, tokens, digest, record="", uses=uses,
            idempotency_key=idempotency_key, sampler=sampler,
        )  # fmt: skip

    async def repeated(self, run: RunRecord, seq: int, digest: str) -> RequestId | None:
        """Name the request that was accepted for this seq with this content; None if there is none.

        Raises:
            StoreUnavailable: try again later.
        """
        try:
            before = await self._redis.zcount(
                run_keys.unnumbered_ops(run.pool, run.id), "-inf", seq
            )
            known = await self._redis.hget(run_keys.digests(run.pool, run.id), str(seq + before))
        except CONNECTION_LOST as lost:
            raise StoreUnavailable from lost
        return request_id(run.id, seq + before) if known == digest.encode() else None

    async def close_run(self, run: RunRecord) -> RequestId:
        """End a run without saving: waiting ops fail, planned ones still commit. Twice is harmless.

        Raises:
            RunNotFound: there is no such run.
            StoreUnavailable: try again later.
        """
        request = RequestId(f"{run.id}:unload")
        result = Result.of_json({"model_id": run.id, "type": "unload_model"})
        script_keys = [run_keys.run(run.id), result_keys.notify_results()]
        args = [
            run.id, fleet_keys.prefix(run.pool), result_keys.SMALL_RESULT_TTL_MS, request,
            result.encode(), UNLOADED.encode(), RunState.CLOSED, run.tenant,
        ]  # fmt: skip
        try:
            answer = await self._close(script_keys, args)
        except CONNECTION_LOST as lost:
            raise StoreUnavailable from lost
        if answer == b"GONE":
            raise RunNotFound
        return request

    async def _accept(
        self,
        run: RunRecord,
        seq: int | None,
        kind: OpKind,
        body: bytes,
        tokens: int,
        digest: str,
        *,
        record: str,
        uses: Sequence[WeightsRef],
        idempotency_key: str,
        save: bytes | None = None,
        sampler: SamplerId | None = None,
    ) -> RequestId:
        await self._capacity.check()
        now, limits = time.time(), self._limits
        following: list[str | int | bytes] = ["", "", "", "", 0]
        with self._capacity.placing() as place:
            if save is not None:
                placed = await _placed(place, run, 1, OpKind.SAVE, save, 0, now)
                following = [hashlib.sha256(save).hexdigest(), *placed, len(save)]
            args = [
                run.id, run.tenant, "" if seq is None else seq, digest, "", b"", "",
                tokens, len(body), int(now * 1000), limits.ops, limits.tokens, limits.bytes,
                MAX_SEQ_GAP, limits.runs, record, idempotency_key,
                fleet_keys.hash_tag(run.pool), repr(run.created_at),
                self._capacity.unread_bytes(limits.unread_bytes),
                *following, sampler or "", sample_keys.EPHEMERAL_SAMPLER_IDLE_MS, SAMPLER_REST_MS,
                limits.samplers, limits.sampler_bytes, limits.record_bytes, *uses,
            ]  # fmt: skip
            answer, at = b"ROOM", list[int]()
            if len(body) > INLINE_LIMIT_BYTES:  # what is not taken is not worth an fsync
                answer, *at = await self._run_submit(run, args)
            if answer == b"ROOM":
                args[_PLACED] = await _placed(place, run, seq or 0, kind, body, tokens, now)
                failpoint("api.before_submit", run.id)
                answer, *at = await self._run_submit(run, args)
                failpoint("api.after_submit", run.id)
        refusal = _REFUSALS.get(answer.decode())
        if refusal:
            raise refusal("This request" if seq is None else f"seq_id {seq}")
        if answer == b"DUP":
            metrics.REQUESTS_DUPLICATE.inc()
        else:
            metrics.REQUESTS_ACCEPTED.labels(kind).inc()
        return request_id(run.id, at[0])

    async def _run_submit(self, run: RunRecord, args: list[Any]) -> list[Any]:
        try:
            answer: list[Any] = await self._submit(_keys_of_submit(run), args)
        except CONNECTION_LOST as lost:
            raise StoreUnavailable from lost
        return answer


async def _placed(
    place: Place, run: RunRecord, seq: int, kind: OpKind, body: bytes, tokens: int, now: float
) -> tuple[str, bytes, str]:
    """Put a body where it belongs; return its op's envelope, what Redis keeps, and its segment."""
    ref = await place(body)
    segment = "" if ref == "inline" else SpoolRef.parse(ref).segment
    op = QueuedOp(run.id, seq, kind, tokens, ref, len(body), now)
    return op.envelope(), b"" if segment else body, segment


def _keys_of_submit(run: RunRecord) -> list[str]:
    pool, tenant = run.pool, run.tenant
    return [
        run_keys.run(run.id), run_keys.log(pool, run.id), run_keys.ops(pool, run.id),
        run_keys.bodies(pool, run.id), run_keys.digests(pool, run.id), run_keys.ready(pool),
        run_keys.gaps(pool), run_keys.queue(pool, tenant), run_keys.queue_tenants(pool),
        result_keys.spool_segment_refs(), tenant_keys.session_runs(run.session),
        tenant_keys.tenant_runs(tenant), fleet_keys.notify_scheduler(),
        run_keys.unnumbered_ops(pool, run.id), tenant_keys.training_runs(tenant),
    ]  # fmt: skip


_REFUSALS: dict[str, Callable[[str], Exception]] = {
    "CONFLICT": lambda what: SeqConflict(f"{what} was already used with different content."),
    "FAR": lambda what: SeqTooFar(f"{what} is too far ahead (more than {MAX_SEQ_GAP} missing)."),
    "WEIGHTS": lambda _: WeightsGone(),
    "GONE": lambda _: RunNotFound(),
    "CLOSED": lambda _: RunClosed(),
    "FAILED": lambda _: RunFailed(),
    "BUSY": lambda _: QueueFull(),
    "UNREAD": lambda _: UnreadQuotaReached(),
    "RUNS": lambda _: RunQuotaReached(),
    "RECORDS": lambda _: RecordQuotaReached(),
    "SAMPLERS": lambda _: SamplerQuotaReached(),
}
