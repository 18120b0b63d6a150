"""What a save leaves in the store: its weights, the name or the sampler they are for, its result."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cotrain_store.messages import (
    CheckpointRecord,
    LoraSpec,
    Result,
    SamplerRecord,
    SaveRecords,
    SaveRequest,
    SessionId,
    WeightsRecord,
    WeightsRef,
    decode,
)
from cotrain_workers.ops import SaveOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotrain_store.messages import PoolId, RunId, SamplerId, Step
    from cotrain_workers.ops import Output
    from cotrain_workers.sample_ops import HostWeights


@dataclass(frozen=True)
class DoneSave:
    """A save that succeeded: what its commit writes, and the weights themselves."""

    records: SaveRecords
    weights: HostWeights

    @property
    def result(self) -> Result:
        """Tell where the weights can be sampled from."""
        said: dict[str, str | None] = {"path": None, "type": "save_weights_for_sampler"}
        if isinstance(self.records.user, SamplerRecord):
            said["sampling_session_id"] = self.records.user.id
        else:
            said["path"] = self.records.user.path
        return Result.of_json(said)


def saves_of(
    step: Step,
    bodies: Mapping[tuple[str, int], bytes],
    outputs: Mapping[tuple[str, int], Output],
    pool: PoolId,
    base_model: str,
) -> dict[tuple[RunId, int], DoneSave]:
    """Describe the saves of a step that succeeded, each by its run and seq."""
    saves = {}
    for op in step.ops:
        output = outputs[op.run, op.seq]
        if isinstance(output, SaveOutput):
            weights = WeightsRecord(
                ref=WeightsRef(op.request_id),
                run=op.run,
                tenant=step.tenant_by_run[op.run],
                pool=pool,
                worker=step.worker,
                base_model=base_model,
                lora=LoraSpec(**asdict(output.weights.spec)),
                created_at=time.time(),
            )
            records = save_records(bodies[op.run, op.seq], weights)
            saves[op.run, op.seq] = DoneSave(records, output.weights)
    return saves


def save_records(body: bytes, weights: WeightsRecord) -> SaveRecords:
    """Make what refers to the weights of a save: a sampler at once, or the name they are kept under."""
    request = decode(SaveRequest, json.loads(body))
    if request.sampler:
        return SaveRecords(weights, _sampler(request.sampler, weights))
    assert request.name
    return SaveRecords(weights, _checkpoint(request.name, request, weights))


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
        kind="sampler_weights",
        name=name,
        weights=weights.ref,
        base_model=weights.base_model,
        created_at=weights.created_at,
        expires_at=None if ttl_s is None else weights.created_at + ttl_s,
        user_metadata=request.user_metadata,
    )
