"""The arguments of `commit.lua`: each op of a step with its result, and what its saves leave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cotrain_store.disk.spool import SpoolRef
from cotrain_store.keys import sample_keys, weights_keys
from cotrain_store.messages.encoding import encode
from cotrain_store.messages.ops import OpKind
from cotrain_store.messages.results import Result
from cotrain_store.messages.samples import SamplerRecord
from cotrain_store.messages.weights import external_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cotrain_store.messages.ids import OpId
    from cotrain_store.messages.ops import QueuedOp, Step
    from cotrain_store.messages.saves import SaveRecords
    from cotrain_store.messages.weights import CheckpointRecord


def op_rows(
    step: Step,
    results: Mapping[OpId, Result],
    crashed: Collection[OpId],
    all_packed: Sequence[tuple[bytes, int]],
) -> list[str | int | bytes]:
    """Write the ops of a step as `commit.lua` reads them; `all_packed` are their results, in order."""
    rows: list[str | int | bytes] = []
    for op, (packed, ttl_ms) in zip(step.ops, all_packed, strict=True):
        tenant = step.tenant_by_run[op.run]
        has_crashed = (op.run, op.seq) in crashed
        released = _body_of(op) if has_crashed or op.kind is OpKind.FORWARD else ""
        kept = _place_of(op) if has_crashed else ""
        size = len(results[op.run, op.seq].payload)
        rows += [
            op.run, op.seq, tenant, op.tokens, op.size, ttl_ms, packed, released, kept, size,
        ]  # fmt: skip
    return rows


def _body_of(op: QueuedOp) -> str:
    """Name where the body is that a committed op needs no more: `inline` or a spool segment."""
    return "inline" if op.ref == "inline" else SpoolRef.parse(op.ref).segment


def _place_of(op: QueuedOp) -> str:
    """Write the envelope of an op of which only the place in the order is left."""
    return replace(op, kind=OpKind.REJECTED, tokens=0, size=0, ref="inline").envelope()


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
        row["collision"] = _collision(user).encode().decode()
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
