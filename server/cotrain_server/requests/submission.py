"""Records of new runs, submission of checked ops to the logs of runs, and the quota of checkpoints."""

import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request

from cotrain.wire.runs import UntypedAPIFuture
from cotrain_server.requests.pass_ops import Op
from cotrain_server.services import Services
from cotrain_store.messages.ids import TenantId, run_id
from cotrain_store.messages.runs import LoraSpec, PoolRecord, RunRecord, SessionRecord


def new_run(
    session: SessionRecord,
    number: int,
    pool: PoolRecord,
    lora: LoraSpec,
    user_metadata: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Return the record of the run with this number in its session."""
    return RunRecord(
        id=run_id(session.id, number), tenant=session.tenant, session=session.id, pool=pool.id,
        base_model=pool.base_model, lora=lora, created_at=time.time(),
        user_metadata=dict(user_metadata or {}),
    )  # fmt: skip


async def submit(
    services: Services, run: RunRecord, seq: int | None, op: Op, idempotency_key: str = ""
) -> UntypedAPIFuture:
    """Append an op to its run's log and return the future of its result.

    An op above the tenant's quotas is appended as one that fails. Without `seq` the op follows all
    earlier requests of the run, and `idempotency_key` identifies repeats.
    """
    quotas = await services.quotas.of(run.tenant)
    op = op.fitting(quotas.tokens, quotas.bytes)
    request_id = await services.intake.submit(
        run, seq, op.kind, op.body, op.tokens, op.digest,
        uses=op.uses, sampler=op.sampler, idempotency_key=idempotency_key,
    )  # fmt: skip
    return UntypedAPIFuture(request_id=request_id, model_id=run.id)


def idempotency_key(request: Request) -> str:
    """Return the key that identifies repeats of a request without a `seq_id`, or "". SDKs send the
    same key with each attempt.
    """
    return request.headers.get("x-idempotency-key", "")[:256]


async def quota_reached(services: Services, tenant: TenantId) -> str:
    """Return the sentence for a tenant that has reached its quota of stored checkpoints, else ""."""
    quotas = await services.quotas.of(tenant)
    count, size_bytes = await services.checkpoints.stored_bytes(tenant)
    if count >= quotas.checkpoints:
        limit = f"{quotas.checkpoints} checkpoints"
    elif size_bytes >= quotas.checkpoint_bytes:
        limit = f"{quotas.checkpoint_bytes} bytes"
    else:
        return ""
    return f"Checkpoint storage quota reached ({limit}). Delete some that are not needed."
