"""Endpoints forward, forward_backward, optim_step, sweep_pass, log_metrics and rewind: check, accept, and answer at once.

A POST never waits for work. SDKs send the chunks of one call in parallel and the first one last. An answer that waited
for an earlier chunk would never end.
"""

import asyncio
from dataclasses import replace
from functools import partial

from fastapi import Request

from cotrain.wire.codec import PROTOBUF
from cotrain.wire.rest import LogMetricsRequest, RewindRequest
from cotrain.wire.runs import ForwardBackwardRequest, ForwardRequest, OptimStepRequest, SweepFutures, UntypedAPIFuture
from cotrain_server.errors import BodyTooLarge, Invalid
from cotrain_server.http.request_body import body_weight, is_json, is_protobuf, json_body
from cotrain_server.http.tenant_routes import DataRoute, ServicesDep, TenantDep, body_of, queued_body, tenant_router
from cotrain_server.requests import passes
from cotrain_server.requests.pass_ops import Op, ParsedPass, pass_op, pass_op_in_child
from cotrain_server.requests.submission import SweepEntry, idempotency_key, joint_ops, read_sweep, submit, sweep_future
from cotrain_server.services import Services
from cotrain_store.errors import BaseModelNotServed, Reason, Refused, RunNotFound
from cotrain_store.messages.ids import RequestId
from cotrain_store.messages.runs import PoolRecord, RunRecord, Tenant
from cotrain_store.oplog.joint_intake import JointOp
from cotrain_store.tenants.history import metric_names

router = tenant_router("training", kind=DataRoute)


@router.post("/forward_backward", **queued_body(ForwardBackwardRequest, binary=True))
async def forward_backward(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a pass that adds to the run's gradient, or with `forward_only` one without a gradient."""
    return await _queue_pass(request, services, tenant, forward_only=False)


@router.post("/forward", **queued_body(ForwardRequest, binary=True))
async def forward(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a pass without a gradient."""
    return await _queue_pass(request, services, tenant, forward_only=True)


@router.post("/optim_step", **queued_body(OptimStepRequest))
async def optim_step(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue one AdamW step on the accumulated gradient."""
    content = await json_body(request)
    step = await services.parser.parse_json(tenant.id, body_weight(request), passes.read_step, content)
    run = await services.records.created_run(tenant.id, step.model_id)
    return await submit(services, run, step.seq, passes.step_op(step), idempotency_key(request))


@router.post("/log_metrics", **queued_body(LogMetricsRequest))
async def log_metrics(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue metrics for the run's history, after all earlier requests of the run."""
    wanted = passes.read_fields(await json_body(request))
    run = await services.records.run(tenant.id, wanted.model_id)
    known = await metric_names(services.connection, run.id)
    return await submit(services, run, wanted.seq, passes.metrics_op(wanted, known))


@router.post("/rewind", **queued_body(RewindRequest))
async def rewind(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue the return of a run to its state after an earlier optimizer step."""
    wanted = passes.read_fields(await json_body(request))
    run = await services.records.run(tenant.id, wanted.model_id)
    return await submit(services, run, wanted.seq, passes.rewind_op(wanted))


@router.post("/sweep_pass", response_model_exclude_none=True, openapi_extra=body_of(binary=True))
async def sweep_pass(request: Request, services: ServicesDep, tenant: TenantDep) -> SweepFutures:
    """Queue one pass for several runs of one base model, and an optimizer step of each if it has
    Adam's parameters. The message is SweepPassRequest of wire.proto.

    The runs may be different in everything else. A run that accepts no requests has an error in the
    answer, and does not affect the others.
    """
    if not is_protobuf(request):
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, f"Send {PROTOBUF}.")
    sweep = read_sweep(await request.body())
    runs = await asyncio.gather(*(_run_or_none(services, tenant, entry) for entry in sweep.entries))
    pools = {run.pool: run.base_model for run in runs if run}
    if len(pools) > 1:
        raise Invalid(f"runs: all runs of one request train one base model, not {', '.join(pools.values())}.")
    joint: list[JointOp] = []
    for pool_id, base_model in pools.items():
        pool = await services.records.pool(pool_id)
        if pool is None:
            raise BaseModelNotServed(f"Base model {base_model!r} is not served here any more.")
        batch = await _checked_op(services, tenant, sweep.batch, pool)
        quotas = await services.quotas.of(tenant.id)
        for entry, run in zip(sweep.entries, runs, strict=True):
            joint += joint_ops(run, entry, batch, quotas.tokens, quotas.bytes) if run else ()
    accepted = await services.intake.submit_together(tenant.id, joint) if joint else []
    by_run: dict[str, list[RequestId | Exception]] = {}
    for op, each in zip(joint, accepted, strict=True):
        by_run.setdefault(op.run.id, []).append(each)
    return SweepFutures(runs=[sweep_future(e.model_id, by_run.get(e.model_id, ())) for e in sweep.entries])


async def _run_or_none(services: Services, tenant: Tenant, entry: SweepEntry) -> RunRecord | None:
    try:
        return await services.records.run(tenant.id, entry.model_id)
    except RunNotFound:
        return None


async def _queue_pass(request: Request, services: Services, tenant: Tenant, *, forward_only: bool) -> UntypedAPIFuture:
    body = await request.body()
    if is_protobuf(request):
        parsed = passes.read_binary_pass(body, forward_only=forward_only)
    elif is_json(request):
        read = partial(passes.read_json_pass, body, forward_only=forward_only)
        parsed = await services.parser.parse_json(tenant.id, body_weight(request), read)
    else:
        raise Refused(Reason.UNSUPPORTED_MEDIA_TYPE, f"Send application/json or {PROTOBUF}.")
    run, pool = await services.records.run_and_pool(tenant.id, parsed.model_id)
    op = await _checked_op(services, tenant, parsed, pool)
    return await submit(services, run, parsed.seq, op, idempotency_key(request))


async def _checked_op(services: Services, tenant: Tenant, parsed: ParsedPass, pool: PoolRecord) -> Op:
    """Return the op of a pass, or a rejected op if the pass exceeds the limits of parsing."""
    if not parsed.needs_child:
        return pass_op(parsed, pool)
    try:
        op = await services.parser.run_in_child(tenant.id, pass_op_in_child, parsed, pool)
    except BodyTooLarge as refused:
        return await services.parser.run(tenant.id, len(parsed.body), Op.rejected, str(refused), parsed.body)
    return op if op.body else replace(op, body=parsed.body)
