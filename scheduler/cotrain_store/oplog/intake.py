"""Intake of ops: the API's side of the log, which accepts requests, and creates and closes runs.

When `submit` returns, the op is durable and its future will resolve. A repeated call with the same
content returns the same request id and runs nothing twice.

The function `refusal` converts a refusal of `submit.lua` to an exception.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from cotrain_store import redis_keys
from cotrain_store.disk.capacity import Capacity
from cotrain_store.disk.spool import INLINE_LIMIT_BYTES, Spool, SpoolRef
from cotrain_store.disk.stored_results import UNLOADED
from cotrain_store.errors import Reason, Refused, RunClosed, RunNotFound, SeqConflict, WeightsDeleted
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RequestId, RunId, SamplerId, SessionId, TenantId, WeightsRef, encode, request_id
from cotrain_store.messages.ops import OpKind, QueuedOp, Result
from cotrain_store.messages.runs import RunRecord, RunState, pool_record
from cotrain_store.monitoring import metrics
from cotrain_store.monitoring.traces import current_traceparent
from cotrain_store.redis_client.connection import Connection
from cotrain_store.redis_client.scripts import async_script
from cotrain_store.tenants.policies import RunWeight, weigh_run
from cotrain_store.tenants.quotas import Quotas, QuotasOf

log = structlog.get_logger()

#: Maximum distance of a seq from the last committed one; a larger one is a client error.
MAX_SEQ_GAP = 1_024
#: A sampler used within this time is not evicted for another.
SAMPLER_REST_MS = 30 * 60 * 1000


@dataclass(frozen=True)
class SubmittedOp:
    """One op in the format of the log."""

    digest: str  # identifies the client's request
    size: int  # bytes of the body
    envelope: str | None = None
    """None if its body is not stored yet. The script then only checks whether it would accept the op."""
    segment: str | None = None
    """Spool segment of the body; None if the body is an argument of the script."""


@dataclass(frozen=True)
class Submission:
    """Argument of `submit.lua`."""

    run: RunId
    tenant: TenantId
    session: SessionId
    created_at: float  # creation time of the run
    pool_tag: str
    seq: int | None  # seq of the client; None for an unnumbered op
    op: SubmittedOp
    tokens: int
    now_ms: int
    limits: Quotas
    max_unread_bytes: int
    record: str | None = None  # record of the run, for the op that creates it
    weighs: RunWeight | None = None
    """Weight of the run, for the op that creates it; None if it is unknown."""
    idempotency_key: str | None = None
    save: SubmittedOp | None = None  # next op, accepted together with this one or not at all
    uses: tuple[WeightsRef, ...] = ()
    """Weights that the op needs. They must be stored, except those of a fork."""
    sampler: SamplerId | None = None
    forks: bool = False
    """True for an op that creates a run from weights that may be in the memory of one worker only."""
    max_seq_gap: int = MAX_SEQ_GAP
    sampler_idle_ms: int = redis_keys.EPHEMERAL_SAMPLER_IDLE_MS
    sampler_rest_ms: int = SAMPLER_REST_MS


class Intake:
    """Creates runs, accepts their ops and closes runs."""

    def __init__(self, connection: Connection, spool: Spool, quotas_of: QuotasOf, disk_reserve_bytes: int = 0) -> None:
        self._quotas_of = quotas_of
        self._capacity = Capacity(connection, spool, disk_reserve_bytes)
        self._submit = async_script(connection, "submit")
        self._close = async_script(connection, "close")
        self._redis = connection

    async def check_capacity(self) -> None:
        """Return if the store can accept a new session, sampler or copy.

        Raises:
            STORE_FULL, DISK_RESERVE_REACHED, CONNECTION_LOST: retry later.
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
        """Create a run: its seq 0, by CREATE, LOAD or IMPORT. A repeat with the same settings creates no second run.

        The `body` is that of a LOAD or IMPORT; by default it is the LoRA settings. The `digest` identifies the client's
        request; by default it covers the base model and the body. The weights in `uses` are kept while the log needs
        the op. The body of a SAVE in `save` becomes seq 1: both ops are accepted, or neither.

        Raises:
            SeqConflict: the same run id with other settings.
            WeightsDeleted: some of `uses` are deleted.
            RECORD_QUOTA_REACHED, RUN_TOO_LARGE: permanent.
            RUN_QUOTA_REACHED, RUN_BYTES_QUOTA_REACHED, QUEUE_FULL, UNREAD_QUOTA_REACHED, STORE_FULL,
                DISK_RESERVE_REACHED,
            CONNECTION_LOST: retry later.
        """
        body = encode(run.lora).encode() if body is None else body
        digest = digest or hashlib.sha256(run.base_model.encode() + b"\0" + body).hexdigest()
        return await self.submit(run, 0, kind, body, 0, digest, record=encode(run), uses=uses, save=save)

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
        idempotency_key: str | None = None,
        sampler: SamplerId | None = None,
        record: str | None = None,
        save: bytes | None = None,
    ) -> RequestId:
        """Accept one op; it is durable when this returns. `digest` identifies the client's request.

        An op without a `seq` is unnumbered: it runs after all ops accepted so far, and before those
        that the client sends later. Two ops with the same `idempotency_key` are one. The weights in
        `uses` are kept while the log needs the op; a repeat does not check that they still exist. A
        save creates `sampler` when it runs, but the sampler counts towards the quota from now on. Only `create_run`
        gives a `record` and a `save`.

        Raises:
            SeqConflict: this seq, or key, was used with other content.
            WeightsDeleted: some of `uses` are deleted.
            SEQ_TOO_FAR: more than MAX_SEQ_GAP ops before it are missing.
            RunClosed, RUN_FAILED, RunNotFound: the run accepts no further ops.
            QUEUE_FULL, UNREAD_QUOTA_REACHED, SAMPLER_QUOTA_REACHED, STORE_FULL, DISK_RESERVE_REACHED,
            CONNECTION_LOST: the request is valid; retry later.
        """
        structlog.contextvars.bind_contextvars(run=run.id, seq=seq)
        await self._capacity.check()
        quotas = await self._quotas_of(run.tenant)
        weighs = await self._weigh(run, quotas.run_bytes) if record else None
        now = time.time()
        with self._capacity.storing() as store:
            along = None if save is None else submitted_op(run, 1, OpKind.SAVE, save, 0, await store(save), now)
            submission = self._submission(
                run, seq, SubmittedOp(digest, len(body)), tokens, now, quotas, record=record, weighs=weighs,
                idempotency_key=idempotency_key or None, save=along, uses=tuple(uses), sampler=sampler,
            )  # fmt: skip
            answer, at = b"ROOM", list[int]()
            if len(body) > INLINE_LIMIT_BYTES:  # checked first: a refused body is not worth an fsync
                answer, *at = await self._run_submit(submission, b"", save or b"")
            if answer == b"ROOM":
                op = submitted_op(run, seq or 0, kind, body, tokens, await store(body), now, digest)
                failpoint("api.before_submit", run.id)
                answer, *at = await self._run_submit(replace(submission, op=op), body, save or b"")
                failpoint("api.after_submit", run.id)
        refused = refusal(answer.decode(), at, submission)
        if refused:
            raise refused
        request = request_id(run.id, at[0])
        if answer == b"DUP":
            metrics.REQUESTS_DUPLICATE.inc()
        else:
            metrics.REQUESTS_ACCEPTED.labels(kind).inc()
        log.debug("request_accepted", request=request, kind=kind.value, tokens=tokens, again=answer == b"DUP")
        return request

    async def repeated(self, run: RunRecord, seq: int, digest: str) -> RequestId | None:
        """Return the request accepted for this seq with this content, or None.

        Raises:
            CONNECTION_LOST: retry later.
        """
        before = await self._redis.zcount(redis_keys.unnumbered_ops(run.pool, run.id), "-inf", seq)
        known = await self._redis.hget(redis_keys.digests(run.pool, run.id), str(seq + before))
        return request_id(run.id, seq + before) if known == digest.encode() else None

    async def close_run(self, run: RunRecord) -> RequestId:
        """Close a run without saving. Pending ops fail, planned ops still commit. Idempotent.

        Raises:
            RunNotFound: the run does not exist.
            CONNECTION_LOST: retry later.
        """
        request = RequestId(f"{run.id}:unload")
        result = Result.of_json({"model_id": run.id, "type": "unload_model"})
        args = {
            "run": run.id, "tenant": run.tenant, "prefix": redis_keys.prefix(run.pool),
            "state": RunState.CLOSED, "failure": UNLOADED.encode().decode(),
            "request": request, "result": result.encode().decode(),
            "ttl_ms": redis_keys.SMALL_RESULT_TTL_MS,
        }  # fmt: skip
        answer = await self._close(args)
        if answer == b"GONE":
            raise RunNotFound
        return request

    def _submission(
        self, run: RunRecord, seq: int | None, op: SubmittedOp, tokens: int, now: float, quotas: Quotas, **more: Any
    ) -> Submission:
        return Submission(
            run=run.id, tenant=run.tenant, session=run.session, created_at=run.created_at,
            pool_tag=redis_keys.hash_tag(run.pool), seq=seq, op=op, tokens=tokens, now_ms=int(now * 1000),
            limits=quotas, max_unread_bytes=self._capacity.unread_bytes(quotas.unread_bytes), **more,
        )  # fmt: skip

    async def _weigh(self, run: RunRecord, quota: int) -> RunWeight | None:
        rows = await self._redis.hvals(redis_keys.pools())
        pools = {pool.id: pool for pool in map(pool_record, rows)}
        if run.pool not in pools:
            return None
        free_bytes = self._capacity.free_disk_bytes
        return weigh_run(run.lora, pools[run.pool], pools.values(), quota, free_bytes)

    async def _run_submit(self, submission: Submission, body: bytes, save: bytes) -> list[Any]:
        inline = body if submission.op.segment is None else b""
        inline_save = save if submission.save and submission.save.segment is None else b""
        answer: list[Any] = await self._submit(submission, inline, inline_save)
        return answer


def submitted_op(
    run: RunRecord, seq: int, kind: OpKind, body: bytes, tokens: int, ref: str, now: float, digest: str = ""
) -> SubmittedOp:
    """Return an op in the format of the log. `ref` is the location of its body."""
    op = QueuedOp(run.id, seq, kind, tokens, ref, len(body), now, current_traceparent())
    return SubmittedOp(
        digest=digest or hashlib.sha256(body).hexdigest(),
        size=len(body),
        envelope=op.envelope(),
        segment=None if ref == "inline" else SpoolRef.parse(ref).segment,
    )


def refusal(answer: str, numbers: Sequence[Any], submission: Submission) -> Exception | None:
    """Return the exception for an answer, or None if the op was or would be accepted.

    `numbers` follow the answer. They are for each answer:

    * a run that would hold too much: the bytes that its tenant's runs hold, and their limit
    * too many runs: the number of live runs, and some of their ids
    * a full queue: its ops, tokens and bytes
    """
    if answer == "RUNS":
        return _too_many_runs(*numbers, most=submission.limits.runs)
    if answer == "BUSY":
        return _full_queue(numbers, submission)
    if submission.weighs and answer in ("RUN_BYTES", "RUN_DISK"):
        return _run_too_large(answer, *numbers, weight=submission.weighs.bytes)
    error = _ERRORS.get(answer)
    return error and error("This request" if submission.seq is None else f"seq_id {submission.seq}")


_ERRORS: dict[str, Callable[[str], Exception]] = {
    "CONFLICT": lambda what: SeqConflict(f"{what} was already used with different content."),
    "FAR": lambda what: Refused(Reason.SEQ_TOO_FAR, f"{what} is too far ahead (more than {MAX_SEQ_GAP} missing)."),
    "WEIGHTS": lambda _: WeightsDeleted(),
    "GONE": lambda _: RunNotFound(),
    "CLOSED": lambda _: RunClosed(),
    "FAILED": lambda _: Refused(Reason.RUN_FAILED),
    "UNREAD": lambda _: Refused(Reason.UNREAD_QUOTA_REACHED),
    "RECORDS": lambda _: Refused(Reason.RECORD_QUOTA_REACHED),
    "SWEPT": lambda _: Refused(Reason.BODY_SWEPT),
    "SAMPLERS": lambda _: Refused(Reason.SAMPLER_QUOTA_REACHED),
}


def _too_many_runs(live: int, some: bytes, *, most: int) -> Exception:
    return Refused(
        Reason.RUN_QUOTA_REACHED,
        f"{live:,} of {most:,} runs of this tenant are live (quota runs), such as {some.decode()}. End one with "
        "run.unload() or cotrain runs end RUN, or ask the operator for a higher limit.",
    )


def _full_queue(queued: Sequence[int], submission: Submission) -> Exception:
    limits = submission.limits
    added = (
        1 + bool(submission.save),
        submission.tokens,
        submission.op.size + (submission.save.size if submission.save else 0),
    )
    most = {"ops": limits.ops, "tokens": limits.tokens, "bytes": limits.bytes}
    rows = zip(most.items(), queued, added, strict=True)
    (name, limit), present, more = next(row for row in rows if row[1] + row[2] > row[0][1])
    return Refused(
        Reason.QUEUE_FULL,
        f"The queue of this tenant is full: {present:,} of {limit:,} {name} (quota {name}), and this request adds "
        f"{more:,}. Wait for results before you send more.",
    )


def _run_too_large(answer: str, present: int, most: int, *, weight: int) -> Exception:
    if answer == "RUN_BYTES" and weight > most:
        return Refused(
            Reason.RUN_TOO_LARGE,
            f"A run of this rank holds {weight} bytes. The quota run_bytes of this tenant is {most}. The operator "
            "can raise it in COTRAIN_QUOTAS.",
        )
    usage = f"The runs of this tenant hold {present} bytes, and this run would hold {weight}."
    limit = (
        f"The quota run_bytes of this tenant is {most}."
        if answer == "RUN_BYTES"
        else f"The disk has {most} bytes left for the runs of all tenants."
    )
    return Refused(Reason.RUN_BYTES_QUOTA_REACHED, f"{usage} {limit} Unload some.")
