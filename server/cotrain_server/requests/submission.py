"""Put an accepted op into its run's log; what every route that makes one does last."""

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
    """Put an op into its run's log and answer with the future of its result.

    Without `seq` it goes behind all that the run was sent so far; `idempotency_key` tells its repeats.
    """
    quotas = await services.quotas.of(run.tenant)
    op = op.fitting(quotas.tokens, quotas.bytes)
    request_id = await services.intake.submit(
        run, seq, op.kind, op.body, op.tokens, op.digest,
        uses=op.uses, sampler=op.sampler, idempotency_key=idempotency_key,
    )  # fmt: skip
    return UntypedAPIFuture(request_id=request_id, model_id=run.id)


def idempotency_key(request: Request) -> str:
    """Read what tells a repeat of a request that has no place of its own: SDKs keep it over an attempt."""
    return request.headers.get("x-idempotency-key", "")[:256]


async def quota_reached(services: Services, tenant: TenantId) -> str:
    """Say which quota of stored checkpoints a tenant has reached; nothing where none."""
    quotas = await services.quotas.of(tenant)
    count, size_bytes = await services.checkpoints.stored_bytes(tenant)
    if count >= quotas.checkpoints:
        limit = f"{quotas.checkpoints} checkpoints"
    elif size_bytes >= quotas.checkpoint_bytes:
        limit = f"{quotas.checkpoint_bytes} bytes"
    else:
        return ""
    return f"Checkpoint storage quota reached ({limit}). Delete some that are not needed."
