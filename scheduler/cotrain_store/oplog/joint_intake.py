"""Acceptance of ops of several runs of one tenant as one change, with each body stored once.

A plan therefore contains all of these ops, unless its budget of tokens ends before. Each op counts
towards the quotas as if it had been sent alone.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import structlog

from cotrain_store.disk.spool import INLINE_LIMIT_BYTES
from cotrain_store.errors import Refused
from cotrain_store.failpoints import failpoint
from cotrain_store.messages.ids import RequestId, TenantId, WeightsRef, encode, request_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import RunRecord
from cotrain_store.monitoring import metrics
from cotrain_store.oplog.intake import Intake, Submission, SubmittedOp, refusal, submitted_op


@dataclass(frozen=True)
class JointOp:
    """One op of the change."""

    run: RunRecord
    seq: int
    kind: OpKind
    body: bytes
    tokens: int
    digest: str
    forked: WeightsRef | None = None
    """Weights of a fork, for the op that creates its run. They are kept while the log needs it."""


#: Request of each op, or the reason why its run accepts no such op.
Accepted: TypeAlias = list[RequestId | Exception]

log = structlog.get_logger()


class JointIntake(Intake):
    """Intake that also accepts ops of several runs together."""

    async def submit_together(self, tenant: TenantId, ops: Sequence[JointOp]) -> Accepted:
        """Accept the ops of a tenant's runs; the accepted ones are durable when this returns.

        A run that accepts no further ops does not affect the others: its ops have the error in the
        result. A repeated call returns the same requests.

        Raises:
            QUEUE_FULL, UNREAD_QUOTA_REACHED, RUN_QUOTA_REACHED, RUN_BYTES_QUOTA_REACHED, STORE_FULL,
            DISK_RESERVE_REACHED, BODY_SWEPT, CONNECTION_LOST: some ops are not accepted; repeat the call later.
        """
        await self._capacity.check()
        quotas = await self._quotas_of(tenant)
        now = time.time()
        copies = Counter(op.body for op in ops)
        weighs = [await self._weigh(op.run, quotas.run_bytes) if op.forked else None for op in ops]
        submissions = [
            self._submission(
                op.run, op.seq, SubmittedOp(op.digest, len(op.body)), op.tokens, now, quotas,
                record=encode(op.run) if op.forked else None, uses=(op.forked,) if op.forked else (),
                forks=bool(op.forked), weighs=weight,
            )
            for op, weight in zip(ops, weighs, strict=True)
        ]  # fmt: skip
        if any(len(body) * count > INLINE_LIMIT_BYTES for body, count in copies.items()):
            await self._run(ops, submissions)  # checked first: a refused body is not worth an fsync
        with self._capacity.storing() as store:
            refs = {body: await store(body, copies=count) for body, count in copies.items()}
            logged = [
                submitted_op(op.run, op.seq, op.kind, op.body, op.tokens, refs[op.body], now, op.digest) for op in ops
            ]
            stored = [replace(each, op=op) for each, op in zip(submissions, logged, strict=True)]
            about = [request_id(op.run.id, op.seq) for op in ops]
            failpoint("api.before_submit", about)
            accepted = await self._run(ops, stored)
            failpoint("api.after_submit", about)
        return accepted

    async def _run(self, ops: Sequence[JointOp], submissions: Sequence[Submission]) -> Accepted:
        bodies = [
            op.body if each.op.envelope and each.op.segment is None else b""
            for op, each in zip(ops, submissions, strict=True)
        ]
        answers: list[list[Any]] = await self._submit({"together": submissions}, *bodies)
        accepted: Accepted = []
        for op, each, (answer, *numbers) in zip(ops, submissions, answers, strict=True):
            refused = refusal(answer.decode(), numbers, each)
            if isinstance(refused, Refused) and refused.reason.retry_after_s is not None:
                raise refused
            accepted.append(refused or request_id(op.run.id, numbers[0] if numbers else op.seq))
            if answer == b"NEW":
                metrics.REQUESTS_ACCEPTED.labels(op.kind).inc()
                log.debug("request_accepted", request=accepted[-1], kind=op.kind.value)
            elif answer == b"DUP":
                metrics.REQUESTS_DUPLICATE.inc()
        return accepted
