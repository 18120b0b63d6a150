"""What the commit script is told of a save: the weights, and the name or the sampler they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cotrain_store.keys import sample_keys, weights_keys
from cotrain_store.messages.encoding import encode
from cotrain_store.messages.results import Result
from cotrain_store.messages.samples import SamplerRecord
from cotrain_store.messages.weights import external_folder

if TYPE_CHECKING:
    from cotrain_store.messages.saves import SaveRecords
    from cotrain_store.messages.weights import CheckpointRecord


def save_row(records: SaveRecords) -> dict[str, Any]:
    """Write the records of one save as `commit.lua` reads them."""
    weights, user = records.weights, records.user
    row: dict[str, Any] = {
        "weights": encode(weights), "worker": weights.worker, "tenant": weights.tenant,
        "user": encode(user), "last": int(records.last),
    }  # fmt: skip
    if weights.external:
        row["folder"] = external_folder(weights.ref)
    if isinstance(user, SamplerRecord):
        return row | _sampler_row(user)
    row |= {"kind": "c", "name": weights_keys.checkpoint_member(user.run, user.kind, user.name)}
    if user.kind == "weights" and not records.overwrite:
        row["collision"] = _collision(user).pack().decode()
    return row


def _sampler_row(sampler: SamplerRecord) -> dict[str, Any]:
    idle_ms = sample_keys.sampler_idle_ms(ephemeral=sampler.ephemeral)
    return {"kind": "s", "name": sampler.id, "session": sampler.session, "idle_ms": idle_ms}


def _collision(checkpoint: CheckpointRecord) -> Result:
    """Say what a save resolves to whose name is in use."""
    message = (
        f"Checkpoint name {checkpoint.name!r} already exists in this run; "
        "pass overwrite=true to replace it."
    )
    return Result.failed(message, "user")
