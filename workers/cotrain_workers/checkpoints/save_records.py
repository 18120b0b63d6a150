"""What a save leaves in the store: its weights, the name or the sampler they are for, its result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cotrain_store.messages.ids import OpId, PoolId, SamplerId, SessionId, WeightsRef
from cotrain_store.messages.ops import Step
from cotrain_store.messages.results import Result
from cotrain_store.messages.runs import LoraSpec
from cotrain_store.messages.samples import SamplerRecord
from cotrain_store.messages.saves import CheckpointRecord, SaveRecords, SaveRequest, WeightsRecord
from cotrain_workers.checkpoints.files import Saved
from cotrain_workers.engine.ops import Output, SaveOutput

#: What the answer to a save is called on the wire.
TYPE_BY_KIND = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


@dataclass(frozen=True)
class DoneSave:
    """A save that succeeded: what its commit writes, what its files hold, and what it answers.

    The answer of a named save appears when its files are durable.
    """

    records: SaveRecords
    saved: Saved
    result: Result
    accepted_at: float
    """In s since 1970."""

    @property
    def is_named(self) -> bool:
        """Tell whether its answer waits for its files."""
        return isinstance(self.records.user, CheckpointRecord)


def saves_of(
    step: Step,
    bodies: Mapping[tuple[str, int], bytes],
    outputs: Mapping[tuple[str, int], Output],
    pool: PoolId,
    base_model: str,
) -> dict[OpId, DoneSave]:
    """Describe the saves of a step that succeeded, each by its run and seq."""
    saves = {}
    for op in step.ops:
        output = outputs[op.run, op.seq]
        if isinstance(output, SaveOutput):
            request = SaveRequest.parse(bodies[op.run, op.seq])
            weights = WeightsRecord(
                ref=WeightsRef(op.request_id),
                run=op.run,
                tenant=step.tenant_by_run[op.run],
                pool=pool,
                worker=step.worker,
                base_model=base_model,
                lora=LoraSpec(**asdict(output.weights.spec)),
                created_at=time.time(),
                has_optimizer=output.optimizer is not None,
                external=bool(request.age_recipients),
            )
            records = save_records(request, weights)
            saved = saved_of(request, output)
            saves[op.run, op.seq] = DoneSave(
                records, saved, result_of_save(request, records), op.accepted_at
            )
    return saves


def saved_of(request: SaveRequest, output: SaveOutput) -> Saved:
    """Tell what the files of a save hold."""
    return Saved(output.weights, output.optimizer, request.age_recipients)


def save_records(request: SaveRequest, weights: WeightsRecord) -> SaveRecords:
    """Make what refers to the weights of a save: a sampler at once, or the name they are kept under."""
    if request.sampler:
        return SaveRecords(weights, _sampler(request.sampler, weights), last=request.last)
    assert request.name
    user = _checkpoint(request.name, request, weights)
    return SaveRecords(weights, user, overwrite=request.overwrite, last=request.last)


def result_of_save(request: SaveRequest, records: SaveRecords) -> Result:
    """Tell where the weights are to be found."""
    answer: dict[str, Any] = {"path": None, "type": TYPE_BY_KIND[request.kind]}
    if isinstance(records.user, SamplerRecord):
        answer["sampling_session_id"] = records.user.id
    else:
        answer["path"] = records.user.path
    return Result.of_json(answer | request.answer)


def _sampler(sampler: SamplerId, weights: WeightsRecord) -> SamplerRecord:
    return SamplerRecord(
        id=sampler,
        tenant=weights.tenant,
        session=SessionId(sampler.partition(":")[0]),
        pool=weights.pool,
        base_model=weights.base_model,
        model_path=None,
        weights=weights.ref,
        ephemeral=True,
        created_at=weights.created_at,
    )


def _checkpoint(name: str, request: SaveRequest, weights: WeightsRecord) -> CheckpointRecord:
    ttl_s = request.ttl_seconds
    return CheckpointRecord(
        run=weights.run,
        tenant=weights.tenant,
        kind=request.kind,
        name=name,
        weights=weights.ref,
        base_model=weights.base_model,
        created_at=weights.created_at,
        expires_at=None if ttl_s is None else weights.created_at + ttl_s,
        user_metadata=request.user_metadata,
    )
