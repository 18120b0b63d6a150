"""Wire format of stored records, and the history of a run as JSON or CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cotrain.wire.checkpoints import TYPE_BY_KIND
from cotrain.wire.rest import Checkpoint, HistoryPoint, TrainingRun
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, RunState
from cotrain_store.tenants.catalog import RunEntry
from cotrain_store.tenants.lists import RunPosition

#: Owner shown for published runs of others, because no tenant may learn another's id.
ANOTHER_TENANT = "another tenant"


def checkpoint_of(record: CheckpointRecord, run: RunRecord | None = None) -> Checkpoint:
    """Return a checkpoint in wire format, with the base model of its run."""
    return Checkpoint(
        checkpoint_id=f"{record.kind}/{record.name}",
        checkpoint_type=TYPE_BY_KIND[record.kind],
        time=utc(record.created_at),
        tinker_path=record.path,
        size_bytes=record.size,
        public=record.public,
        user_metadata=text_by_name(record.user_metadata),
        expires_at=None if record.expires_at is None else utc(record.expires_at),
        base_model=run.base_model if run else None,
        step=record.step,
        metrics=dict(record.metrics) or None,
    )


def training_run_of(entry: RunEntry, tenant: TenantId, position: RunPosition | None = None) -> TrainingRun:
    """Return a run as shown to a tenant, with its progress if `position` is given.

    For another tenant's run, return only what its published checkpoints reveal.
    """
    run = entry.run
    is_own = run.tenant == tenant
    newest = [found for found in (entry.last_checkpoint, entry.last_sampler_checkpoint) if found]
    last_request_at = run.last_request_at or run.created_at
    return TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=tenant if is_own else ANOTHER_TENANT,
        corrupted=is_own and run.state is RunState.FAILED,
        lora_rank=run.lora.rank,
        lora_alpha=run.lora.alpha,
        last_request_time=utc(
            last_request_at if is_own else max((found.created_at for found in newest), default=run.created_at)
        ),
        last_checkpoint=checkpoint_of(entry.last_checkpoint, run) if entry.last_checkpoint else None,
        last_sampler_checkpoint=(
            checkpoint_of(entry.last_sampler_checkpoint, run) if entry.last_sampler_checkpoint else None
        ),
        user_metadata=text_by_name(run.user_metadata) if is_own else None,
        weights_epoch=run.weights_epoch if is_own else 0,
        rolled_back_to=(run.rolled_back_to or None) if is_own else None,
        note=(run.note or None) if is_own else None,
        tags=list(run.tags) if is_own else [],
        **(_progress(run, position) if is_own and position else {}),
    )


def _progress(run: RunRecord, position: RunPosition) -> dict[str, Any]:
    newest, is_live = position.newest, run.state is RunState.LIVE
    is_waiting = is_live and position.accepted > position.done
    ended = "failed" if run.state is RunState.FAILED else "ended"
    return {
        "state": ("waiting" if is_waiting else "idle") if is_live else ended,
        "steps": newest.step if newest else 0,
        "last_loss": newest.loss_sum / newest.weight_sum if newest and newest.weight_sum else None,
        "failed_requests": position.failed,
    }


def text_by_name(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """Return metadata in wire format: non-text values as JSON, an empty mapping as None."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()} or None


def utc(seconds: float) -> datetime:
    """Return a time in UTC from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)


def csv_of(points: Sequence[HistoryPoint]) -> str:
    """Return a history as CSV: a header line, then a line per point, with floats in full precision."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(HistoryPoint.model_fields)
    table.writerows(dict(point).values() for point in points)
    return text.getvalue()
