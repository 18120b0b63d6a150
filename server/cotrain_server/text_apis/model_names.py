"""What the `model` of an OpenAI or Anthropic request names, and the sampler that stands for it.

`<base model>`, `tinker://<run>/sampler_weights/<name>`, or both as `<base model>;<path>`.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cotrain_server.errors import Invalid
from cotrain_server.requests.checkpoint_validation import check_loadable
from cotrain_server.requests.sample_validation import check_sampleable
from cotrain_server.text_apis.tokenizer_cache import language_of
from cotrain_store.errors import BaseModelNotServed
from cotrain_store.messages.ids import SamplerId, SessionId
from cotrain_store.messages.samples import SamplerRecord

if TYPE_CHECKING:
    from cotrain_server.services import Services
    from cotrain_server.text_apis.tokenizer_cache import Language
    from cotrain_store.messages.ids import TenantId
    from cotrain_store.messages.pools import PoolRecord
    from cotrain_store.messages.weights import CheckpointRecord

SCHEME = "tinker://"


@dataclass(frozen=True)
class Target:
    """Something to sample from, and how to talk with it."""

    sampler: SamplerRecord
    pool: PoolRecord
    language: Language


async def find_target(services: Services, tenant: TenantId, model: str) -> Target:
    """Find what a tenant names, and its sampler: made at the first request, the same ever after.

    Raises:
        BaseModelNotServed, CheckpointNotFound, MalformedPath: it names nothing of this tenant's.
        Invalid: the two halves do not fit, or it cannot be sampled from in words.
    """
    base_model, path = _halves(model)
    checkpoint = await services.records.checkpoint(tenant, path) if path else None
    if checkpoint:
        check_loadable(checkpoint)
    if checkpoint and base_model not in ("", checkpoint.base_model):
        raise Invalid(f"model: {path} was trained on {checkpoint.base_model}, not {base_model}.")
    pool = await services.records.pool_of(checkpoint.base_model if checkpoint else base_model)
    check_sampleable(pool)
    language = await language_of(pool, services.settings)
    sampler = _sampler(tenant, pool, checkpoint, path)
    return Target(await services.records.create_sampler(sampler), pool, language)


def _halves(model: str) -> tuple[str, str]:
    """Cut into base model and path; either may be empty."""
    base_model, _, path = model.partition(";")
    if base_model.startswith(SCHEME) and not path:
        return "", base_model
    if path and not path.startswith(SCHEME):
        raise BaseModelNotServed(f"{model!r} is neither a base model nor a {SCHEME} path.")
    return base_model, path


def _sampler(
    tenant: TenantId, pool: PoolRecord, checkpoint: CheckpointRecord | None, path: str
) -> SamplerRecord:
    weights = checkpoint.weights if checkpoint else None
    # Named by all that it is made of: naming a checkpoint anew gives another sampler. No session
    # that a client opened has such an id.
    made_of = "\0".join([tenant, pool.id, path, weights or ""])
    session = SessionId("words-" + hashlib.sha256(made_of.encode()).hexdigest()[:32])
    return SamplerRecord(
        id=SamplerId(f"{session}:sample:0"),
        tenant=tenant,
        session=session,
        pool=pool.id,
        base_model=pool.base_model,
        model_path=path or None,
        weights=weights,
        ephemeral=False,
        created_at=time.time(),
    )
