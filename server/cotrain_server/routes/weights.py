"""Endpoints to save the weights of a run, to load them into a run, and to fork runs."""

from dataclasses import replace
from typing import Any

from fastapi import Request

from cotrain.wire.checkpoints import (
    CreateFromWeightsRequest,
    LoadWeightsRequest,
    OptimizerChoice,
    SaveWeightsExternalRequest,
    SaveWeightsRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from cotrain.wire.constants import MAX_SWEEP_RUNS
from cotrain.wire.runs import ForkRunRequest, SweepFutures, UntypedAPIFuture
from cotrain.wire.sampling import SaveWeightsForSamplerRequest
from cotrain_server.errors import Invalid
from cotrain_server.http.request_body import json_body
from cotrain_server.http.tenant_routes import ServicesDep, TenantDep, queued_body, tenant_router
from cotrain_server.requests.checkpoint_validation import (
    WRONG_PATH,
    Source,
    check_metadata,
    check_optimizer,
    find_loadable,
    find_source,
    quota_reached,
    reader_of,
)
from cotrain_server.requests.checkpoints import load_body, load_op, read_as, save_op
from cotrain_server.requests.pass_ops import Op, digest_of
from cotrain_server.requests.pass_validation import check_rank
from cotrain_server.requests.passes import canonical_json, json_object, read_fields
from cotrain_server.requests.submission import new_run, submit, sweep_future
from cotrain_server.services import Services
from cotrain_store.errors import Reason, Refused, RunNotFound
from cotrain_store.messages.ids import RequestId, run_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import CheckpointKind, LoraSpec, SessionRecord, Tenant
from cotrain_store.oplog.joint_intake import JointOp

router = tenant_router("weights")


@router.post("/save_weights", **queued_body(SaveWeightsRequest))
async def save_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a save of the weights and the optimizer state, from which training can resume."""
    return await _save(request, services, tenant, "weights")


@router.post("/save_weights_for_sampler", **queued_body(SaveWeightsForSamplerRequest))
async def save_weights_for_sampler(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a save of the weights after all earlier requests.

    With `kind` inflight, a snapshot is made as well: its sampler never sees later weights.
    """
    return await _save(request, services, tenant, "sampler_weights")


@router.post("/save_weights_external", **queued_body(SaveWeightsExternalRequest))
async def save_weights_external(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue files for download, encrypted if recipients are given."""
    return await _save(request, services, tenant, "external_weights")


async def _save(request: Request, services: Services, tenant: Tenant, kind: CheckpointKind) -> UntypedAPIFuture:
    save = read_fields(await json_body(request))
    run = await services.records.run(tenant.id, save.model_id)
    op = save_op(save, run, kind)
    is_named = save.fields.get("sampling_session_seq_id") is None
    if is_named and (full := await quota_reached(services, tenant.id)):
        op = op.refused(full)
    return await submit(services, run, save.seq, op)


@router.post("/weights_info")
async def weights_info(wanted: WeightsInfoRequest, services: ServicesDep, tenant: TenantDep) -> WeightsInfoResponse:
    """Return the properties that a run needs to load a checkpoint."""
    weights = (await find_source(services, tenant.id, wanted.tinker_path)).weights
    return WeightsInfoResponse(
        base_model=weights.base_model,
        lora_rank=weights.lora.rank,
        lora_alpha=weights.lora.alpha,
        train_unembed=weights.lora.train_unembed,
        train_mlp=weights.lora.train_mlp,
        train_attn=weights.lora.train_attn,
        optimizer_config=OptimizerChoice(type=weights.lora.optimizer),
    )


@router.post("/load_weights", **queued_body(LoadWeightsRequest, CreateFromWeightsRequest))
async def load_weights(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue the loading of a checkpoint into a run. With `session_id`, create a run with it."""
    content = await json_body(request)
    fields = json_object(content)
    if fields.get("session_id") is not None:
        return await _create(request, services, tenant, fields)
    load = read_fields(content)
    run = await services.records.run(tenant.id, load.model_id)
    try:
        wanted = read_as(LoadWeightsRequest, load.fields)
        reader = await reader_of(request, services, tenant.id, wanted.weights_access_token)
        source = await find_loadable(services, reader, wanted.path)
        return await submit(services, run, load.seq, load_op(load, wanted, source.weights, run))
    except WRONG_PATH as error:
        op = Op.rejected(str(error), canonical_json(load.fields))
        return await submit(services, run, load.seq, op)


@router.post("/fork_run", response_model_exclude_none=True)
async def fork_run(request: ForkRunRequest, services: ServicesDep, tenant: TenantDep) -> SweepFutures:
    """Queue the creation of runs with the state of an unnamed save that has the optimizer state.

    All of them are created in one cycle, from the memory of the worker, which need not have stored the
    save yet. Idempotent.
    """
    session = await services.records.open_session(tenant.id, request.session_id)
    sampler = await services.records.sampler(tenant.id, request.sampling_session_id)
    if sampler.weights is None:
        raise Invalid("sampling_session_id is a sampler of the base model: fork a run.")
    weights = await services.records.weights(sampler.weights)
    check_optimizer(weights, optimizer=True)
    if weights.lora.optimizer != "adamw":
        raise Invalid(
            f"sampling_session_id: forks train with adamw, and this run has {weights.lora.optimizer}. "
            "Save its state, and create runs from the checkpoint."
        )
    numbers, metadata = request.model_seq_ids, request.user_metadata or [{}] * MAX_SWEEP_RUNS
    if len(set(numbers)) < len(numbers) or len(metadata) < len(numbers):
        raise Invalid("model_seq_ids must differ, and user_metadata must have an entry for each.")
    for entry in metadata:
        check_metadata(entry)
    pool = await services.records.pool_of(weights.base_model)
    body = load_body(f"tinker://{weights.run}", weights, optimizer=True, creates=weights.lora)
    digest = digest_of(body)
    runs = [new_run(session, numbers[at], pool, weights.lora, metadata[at]) for at in range(len(numbers))]
    ops = [JointOp(run, 0, OpKind.LOAD, body, 0, digest, weights.ref) for run in runs]
    accepted = await services.intake.submit_together(tenant.id, ops)
    max_bytes = (await services.quotas.of(tenant.id)).record_bytes
    for op, each in zip(ops, accepted, strict=True):
        if request.tags and isinstance(each, str):
            await services.run_labels.set(op.run, max_bytes, tags=request.tags)
    return SweepFutures(runs=[sweep_future(op.run.id, [each]) for op, each in zip(ops, accepted, strict=True)])


async def _create(request: Request, services: Services, tenant: Tenant, fields: dict[str, Any]) -> UntypedAPIFuture:
    """Create a run by a load. Idempotent, because the client's own number identifies the run."""
    wanted = read_as(CreateFromWeightsRequest, fields)
    session = await services.records.session(tenant.id, wanted.session_id)
    digest = digest_of(canonical_json(fields))
    request_id = await _known(services, session, wanted.model_seq_id, digest)
    if request_id is None:
        check_metadata(wanted.user_metadata)
        reader = await reader_of(request, services, tenant.id, wanted.weights_access_token)
        source = await find_loadable(services, reader, wanted.path)
        request_id = await _start(services, session, wanted, source, digest)
    model_id = run_id(session.id, wanted.model_seq_id)
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


async def _known(services: Services, session: SessionRecord, model_seq_id: int, digest: str) -> RequestId | None:
    """Return the request that created this run before, even if its path names another checkpoint by now."""
    try:
        run = await services.records.run(session.tenant, run_id(session.id, model_seq_id))
    except RunNotFound:
        return None
    return await services.intake.repeated(run, 0, digest)


async def _start(
    services: Services, session: SessionRecord, wanted: CreateFromWeightsRequest, source: Source, digest: str
) -> RequestId:
    weights = source.weights
    if session.finished_at is not None:
        raise Refused(Reason.SESSION_FINISHED)
    lora = _with_optimizer(weights.lora, wanted)
    if wanted.base_model not in (None, weights.base_model):
        raise Invalid(f"The checkpoint is of base model {weights.base_model}.")
    check_optimizer(weights, optimizer=wanted.optimizer)
    pool = await services.records.pool_of(weights.base_model)
    check_rank(weights.lora.rank, pool.max_rank)
    run = new_run(session, wanted.model_seq_id, pool, lora, wanted.user_metadata)
    body = load_body(wanted.path, weights, optimizer=wanted.optimizer, creates=lora)
    return await services.intake.create_run(run, kind=OpKind.LOAD, body=body, digest=digest, uses=(weights.ref,))


def _with_optimizer(lora: LoraSpec, wanted: CreateFromWeightsRequest) -> LoraSpec:
    """Return the adapter of a new run with its optimizer: that of the state, if it is loaded. Raises Invalid."""
    chosen = wanted.optimizer_config.type if wanted.optimizer_config else None
    if chosen not in (None, "adamw", "muon"):
        raise Invalid(f"optimizer_config.type: {chosen!r:.40} is not served. Known: adamw, muon.")
    if wanted.optimizer:
        if chosen not in (None, lora.optimizer):
            raise Invalid(f"optimizer_config.type: the optimizer state is of {lora.optimizer}; load it without.")
        chosen = lora.optimizer
    return replace(lora, optimizer=chosen or "adamw")
