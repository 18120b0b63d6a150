"""Conversion of saves, loads and interpolations to ops of the log. Pure: request and resolved path in, op out.

An interpolation is a load of several sources into a new run, and a save that ends it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cotrain.wire.checkpoints import LoadWeightsRequest, SaveWeightsExternalRequest, SaveWeightsRequest
from cotrain.wire.runs import InterpolateRequest
from cotrain.wire.sampling import SaveWeightsForSamplerRequest
from cotrain_server.errors import Invalid, first_error
from cotrain_server.requests.checkpoint_validation import (
    check_fits,
    check_metadata,
    check_name,
    check_optimizer,
    check_recipients,
    check_ttl,
)
from cotrain_server.requests.pass_ops import Op, digest_of
from cotrain_server.requests.passes import ParsedFields, canonical_json, op_or_refusal
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.messages.ids import encode, sampler_id
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.runs import DEFAULT_ALPHA, CheckpointKind, LoraSpec, RunRecord, WeightsRecord

#: Default name of a combination. Each combination has its own run.
UNNAMED = "interpolated"
MAX_SOURCES = 64

SaveReader = Callable[[ParsedFields, RunRecord], SaveRequest]

Shape = TypeVar("Shape", bound=BaseModel)


def save_op(request: ParsedFields, run: RunRecord, kind: CheckpointKind) -> Op:
    """Check a save of a kind and return its op."""
    # SDK 0.38 assigns a new sampler number each time it repeats a save. The first number counts.
    is_unnamed = request.fields.get("sampling_session_seq_id") is not None
    content = canonical_json([kind, {**request.fields, "sampling_session_seq_id": is_unnamed}])

    def make() -> Op:
        save = _READERS[kind](request, run)
        if save.name is not None:
            check_name(save.name)
        check_ttl(save.ttl_seconds)
        check_metadata(save.user_metadata)
        return Op(OpKind.SAVE, encode(save).encode(), 0, digest_of(content), sampler=save.sampler)

    return op_or_refusal(make, content)


def _training(request: ParsedFields, run: RunRecord) -> SaveRequest:
    wanted = SaveWeightsRequest.model_validate(request.fields)
    return SaveRequest(
        name=f"{request.seq:06d}" if wanted.path is None else wanted.path,
        kind="weights",
        overwrite=wanted.overwrite,
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=dict(wanted.user_metadata or {}),
    )


def _for_sampler(request: ParsedFields, run: RunRecord) -> SaveRequest:
    wanted = SaveWeightsForSamplerRequest.model_validate(request.fields)
    number = wanted.sampling_session_seq_id
    if (wanted.path is None) == (number is None):
        raise Invalid("Exactly one of path and sampling_session_seq_id is needed.")
    if wanted.optimizer and number is None:
        raise Invalid("optimizer is for a save without a path: save_weights has the optimizer state.")
    return SaveRequest(
        name=wanted.path,
        sampler=None if number is None else sampler_id(run.session, number),
        kind="weights" if wanted.optimizer else "sampler_weights",
        answer={"type": "save_weights_for_sampler"} if wanted.optimizer else {},
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=dict(wanted.user_metadata or {}),
    )


def _external(request: ParsedFields, run: RunRecord) -> SaveRequest:
    wanted = SaveWeightsExternalRequest.model_validate(request.fields)
    recipients = wanted.age_encryption_recipients
    if recipients is not None:
        check_recipients(recipients)
    return SaveRequest(
        name=wanted.path,
        kind="external_weights",
        ttl_seconds=wanted.ttl_seconds,
        user_metadata=dict(wanted.user_metadata or {}),
        age_recipients=tuple(recipients or ()),
    )


_READERS: Mapping[CheckpointKind, SaveReader] = {
    "weights": _training,
    "sampler_weights": _for_sampler,
    "external_weights": _external,
}


def read_as(shape: type[Shape], fields: dict[str, Any]) -> Shape:
    """Parse fields as a model. Raises Invalid with the name of the first wrong field."""
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        raise Invalid(first_error(error)) from error


def load_op(request: ParsedFields, wanted: LoadWeightsRequest, weights: WeightsRecord, run: RunRecord) -> Op:
    """Return the op of a load into a run. Raises Invalid if the weights do not fit."""
    check_fits(weights, run, optimizer=wanted.optimizer)
    check_optimizer(weights, optimizer=wanted.optimizer)
    body = load_body(wanted.path, weights, optimizer=wanted.optimizer)
    return Op(OpKind.LOAD, body, 0, digest_of(canonical_json(request.fields)), (weights.ref,))


def load_body(path: str, weights: WeightsRecord, *, optimizer: bool, creates: LoraSpec | None = None) -> bytes:
    """Return the body of a load. `creates` is set if the load creates its run."""
    return encode(LoadRequest(path, (LoadSource(weights.ref),), optimizer, creates)).encode()


def check_mix(wanted: InterpolateRequest) -> None:
    """Check an interpolation before its sources are looked up. Raises Invalid."""
    count = len(wanted.source_paths)
    if not 1 <= count <= MAX_SOURCES:
        raise Invalid(f"source_paths must have 1 to {MAX_SOURCES} entries.")
    if len(wanted.coefficients) != count:
        raise Invalid(f"coefficients has {len(wanted.coefficients)} entries for {count} sources.")
    name = wanted.output_path
    if name is not None and "/" in name:
        raise Invalid(
            "output_path must be a plain name, because the result belongs to a new run whose id the server assigns."
        )
    if name is not None:
        check_name(name)


def mixed_lora(sources: Sequence[WeightsRecord]) -> LoraSpec:
    """Return the LoRA spec of a combination: the sum of all ranks, and every module that any source trains.

    An alpha common to all sources is kept, otherwise the default applies.
    """
    loras = [source.lora for source in sources]
    alphas = {lora.alpha for lora in loras}
    return LoraSpec(
        rank=sum(lora.rank for lora in loras),
        seed=loras[0].seed,
        train_attn=any(lora.train_attn for lora in loras),
        train_mlp=any(lora.train_mlp for lora in loras),
        train_unembed=any(lora.train_unembed for lora in loras),
        alpha=alphas.pop() if len(alphas) == 1 else DEFAULT_ALPHA,
        per_expert=any(lora.per_expert for lora in loras),
    )


def mix_body(wanted: InterpolateRequest, sources: Sequence[WeightsRecord]) -> bytes:
    """Return the body of the load that creates a combination. Raises Invalid if the base models differ."""
    if len({source.base_model for source in sources}) > 1:
        names = ", ".join(dict.fromkeys(source.base_model for source in sources))
        raise Invalid(f"source_paths: the checkpoints are of several base models ({names}).")
    load = LoadRequest(
        path=wanted.source_paths[0],
        sources=tuple(
            LoadSource(source.ref, coefficient)
            for source, coefficient in zip(sources, wanted.coefficients, strict=True)
        ),
        optimizer=False,
        lora=mixed_lora(sources),
    )
    return encode(load).encode()


def mix_save_body(wanted: InterpolateRequest) -> bytes:
    """Return the body of the save that names a combination and ends its run."""
    answer = {
        "checkpoint_type": "sampler",
        "source_paths": wanted.source_paths,
        "coefficients": wanted.coefficients,
        "has_rank_shards": False,
        "type": "mint_interpolate_checkpoints",
    }
    return encode(SaveRequest(wanted.output_path or UNNAMED, answer=answer, last=True)).encode()
