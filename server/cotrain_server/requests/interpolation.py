"""Conversion of a checkpoint interpolation to the ops of a run: a load of several sources, and a
save. Pure.
"""

from collections.abc import Sequence

from cotrain.wire.runs import InterpolateRequest
from cotrain_server.errors import Invalid
from cotrain_server.requests.checkpoint_validation import check_name
from cotrain_store.bodies.adapter_bodies import LoadRequest, LoadSource, SaveRequest
from cotrain_store.messages.ids import encode
from cotrain_store.messages.runs import DEFAULT_ALPHA, LoraSpec, WeightsRecord

#: Default name of a combination. Each combination has its own run.
UNNAMED = "interpolated"
MAX_SOURCES = 64


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
    """Return the LoRA spec of a combination: the sum of all ranks, and every module that any source
    trains.

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
    """Return the body of the load that creates a combination. Raises Invalid if the base models
    differ.
    """
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
