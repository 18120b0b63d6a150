"""Submission of an accepted op to its run's log, the last step of every route that creates one."""

from __future__ import annotations

from fastapi import Request

from cotrain.wire.runs import UntypedAPIFuture
from cotrain_server.requests.passes import Op
from cotrain_server.services import Services
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import RunRecord


async def submit(
    services: Services, run: RunRecord, seq: int | None, op: Op, idempotency_key: str = ""
) -> UntypedAPIFuture:
    """Append an op to its run's log and return the future of its result.

    Without `seq` the op follows all earlier requests of the run, and `idempotency_key` identifies
    repeats.
    """
    quotas = await services.quotas.of(run.tenant)
    op = op.fitting(quotas.tokens, quotas.bytes)
    request_id = await services.intake.submit(
        run, seq, op.kind, op.body, op.tokens, op.digest,
        uses=op.uses, sampler=op.sampler, idempotency_key=idempotency_key,
    )  # fmt: skip
    return UntypedAPIFuture(request_id=request_id, model_id=run.id)


def idempotency_key(request: Request) -> str:
    """Return the key that identifies repeats of a request without a position. SDKs reuse it for
    each attempt.
    """
    return request.headers.get("x-idempotency-key", "")[:256]


async def quota_reached(services: Services, tenant: TenantId) -> str:
    """Return the quota of stored checkpoints that a tenant has reached, or ""."""
    quotas = await services.quotas.of(tenant)
    count, size_bytes = await services.checkpoints.stored_bytes(tenant)
    if count >= quotas.checkpoints:
        limit = f"{quotas.checkpoints} checkpoints"
    elif size_bytes >= quotas.checkpoint_bytes:
        limit = f"{quotas.checkpoint_bytes} bytes"
    else:
        return ""
    return f"Checkpoint storage quota reached ({limit}). Delete some that are not needed."
