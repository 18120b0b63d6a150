"""Extensions of the `mint` SDK: reverse KL to a reference, and interpolation of checkpoints."""

from collections.abc import Sequence

from fastapi import APIRouter, Request

from cotrain.wire.runs import InterpolateRequest, ReverseKlRequest, UntypedAPIFuture
from cotrain_server.errors import Invalid
from cotrain_server.http.request_body import body_weight, json_body
from cotrain_server.http.tenant_routes import DataRoute, ServicesDep, TenantDep, TenantRoute, api_key, queued_body
from cotrain_server.requests.checkpoint_validation import WRONG_PATH, find_loadable, quota_reached
from cotrain_server.requests.checkpoints import check_mix, mix_body, mix_save_body, mixed_lora
from cotrain_server.requests.pass_ops import Op
from cotrain_server.requests.pass_validation import check_rank
from cotrain_server.requests.reverse_kl import ParsedKl, read_reverse_kl, reverse_kl_op
from cotrain_server.requests.submission import idempotency_key, new_run, submit
from cotrain_server.services import Services
from cotrain_store.messages.ids import TenantId, WeightsRef, request_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import PoolRecord, RunRecord, Tenant, WeightsRecord

router = APIRouter(prefix="/api/v1/mint", tags=["mint"], dependencies=[api_key])
passes = APIRouter(route_class=DataRoute)
checkpoints = APIRouter(route_class=TenantRoute)


@passes.post("/forward_backward_reverse_kl", **queued_body(ReverseKlRequest))
async def forward_backward_reverse_kl(request: Request, services: ServicesDep, tenant: TenantDep) -> UntypedAPIFuture:
    """Queue a pass that adds the gradient of `sum weight * KL(run || reference)` to the run's.

    Without a `seq_id` it follows all earlier requests of the run.
    """
    content, weight = await json_body(request), body_weight(request)
    wanted = await services.parser.parse_json(tenant.id, weight, read_reverse_kl, content)
    run, pool = await services.records.run_and_pool(tenant.id, wanted.model_id)
    key = idempotency_key(request)
    try:
        reference = await _reference(services, tenant.id, wanted, pool)
        op = await services.parser.run(tenant.id, weight, reverse_kl_op, wanted, reference, pool)
        return await submit(services, run, wanted.seq, op, key)
    except WRONG_PATH as error:
        message = f"reference_model_path: {error}"
        op = await services.parser.run(tenant.id, weight, Op.rejected, message, wanted.content)
        return await submit(services, run, wanted.seq, op, key)


async def _reference(services: Services, tenant: TenantId, wanted: ParsedKl, pool: PoolRecord) -> WeightsRef | None:
    """Return the weights that a request names as its reference; None for the base model alone.

    Also None for a path that is not a string, which `reverse_kl_op` refuses.
    """
    path = wanted.reference_path
    if path is None or path == pool.base_model:
        return None
    if not path.startswith("tinker://"):
        raise Invalid(f"{path!r:.200} is neither a tinker:// path nor {pool.base_model}, the run's base model.")
    weights = (await find_loadable(services, tenant, path)).weights
    if weights.base_model != pool.base_model:
        raise Invalid(f"the checkpoint is of base model {weights.base_model}, the run of {pool.base_model}.")
    return weights.ref


@checkpoints.post("/checkpoints/interpolate", response_model_exclude_none=True)
async def interpolate_checkpoints(
    wanted: InterpolateRequest, services: ServicesDep, tenant: TenantDep
) -> UntypedAPIFuture:
    """Queue the creation of sampler weights whose change of the base model is `sum c_i * change_i`.

    A change is the product B A of an adapter, times its scale. The result belongs to a new run, whose
    log is a load of all sources and a save.
    """
    check_mix(wanted)
    sources = [(await find_loadable(services, tenant.id, path)).weights for path in wanted.source_paths]
    if full := await quota_reached(services, tenant.id):
        raise Invalid(full)
    body = mix_body(wanted, sources)
    run = await _open_run(services, tenant, sources)
    uses = tuple(dict.fromkeys(source.ref for source in sources))
    save = mix_save_body(wanted)
    await services.intake.create_run(run, kind=OpKind.LOAD, body=body, uses=uses, save=save)
    await services.records.finish(tenant.id, run.session, "success")
    return UntypedAPIFuture(request_id=request_id(run.id, 1), model_id=run.id)


async def _open_run(services: Services, tenant: Tenant, sources: Sequence[WeightsRecord]) -> RunRecord:
    """Return the record of a run for an interpolation, in a new session without a client."""
    lora, pool = mixed_lora(sources), await services.records.pool_of(sources[0].base_model)
    try:
        check_rank(lora.rank, pool.max_rank)
    except Invalid as error:
        raise Invalid(f"The ranks of the sources add up to {lora.rank}: {error}") from error
    session = await services.records.create_session(tenant.id, tags=("interpolation",), key_id=tenant.key_id)
    return new_run(session, 0, pool, lora)


router.include_router(passes)
router.include_router(checkpoints)
