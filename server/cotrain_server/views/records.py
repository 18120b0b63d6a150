"""Wire format of stored runs, checkpoints and sessions, the filters of their searches, and a run's history as CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cotrain.wire import rest as wire
from cotrain.wire.checkpoints import TYPE_BY_KIND
from cotrain_store.errors import Reason
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, RunState, SessionRecord
from cotrain_store.tenants.catalog import RunEntry
from cotrain_store.tenants.run_list import RunPosition
from cotrain_store.tenants.session_search import Cursor, SessionEntry, Stored

#: Owner shown for published runs of others, because no tenant may learn another's id.
ANOTHER_TENANT = "another tenant"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def checkpoint_of(record: CheckpointRecord, run: RunRecord | None = None) -> wire.Checkpoint:
    """Return a checkpoint in wire format, with the base model of its run."""
    return wire.Checkpoint(
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


def training_run_of(entry: RunEntry, tenant: TenantId, position: RunPosition | None = None) -> wire.TrainingRun:
    """Return a run as shown to a tenant, with its progress if `position` is given.

    For another tenant's run, return only what its published checkpoints reveal.
    """
    run = entry.run
    is_own = run.tenant == tenant
    newest = [found for found in (entry.last_checkpoint, entry.last_sampler_checkpoint) if found]
    last_request_at = run.last_request_at or run.created_at
    return wire.TrainingRun(
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
        "last_loss": mean_loss(newest),
        "failed_requests": position.failed,
    }


def mean_loss(point: wire.HistoryPoint | None) -> float | None:
    """Return the loss of a step per unit of weight, or None if unknown."""
    if point is None or not point.weight_sum:
        return None
    return point.loss_sum / point.weight_sum


def text_by_name(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """Return metadata in wire format: non-text values as JSON, an empty mapping as None."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()} or None


def utc(seconds: float) -> datetime:
    """Return a time in UTC from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC)


def csv_of(points: Sequence[wire.HistoryPoint]) -> str:
    """Return a history as CSV: a header line, then a line per point, with floats in full precision."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(wire.HistoryPoint.model_fields)
    table.writerows(dict(point).values() for point in points)
    return text.getvalue()


def may_find(owner: wire.SearchOwner, tenant: TenantId) -> bool:
    """Return True if a search includes the tenant's own sessions. It never sees others."""
    if isinstance(owner, (wire.OwnSearchOwner, wire.AccessibleSearchOwner)):
        return True
    return tenant in owner.owner_urns


def matches(wanted: wire.SessionSearchRequest, entry: SessionEntry) -> bool:
    """Return True if a session matches a search."""
    session = entry.record
    in_project = wanted.project_ids is None or (session.project_id or "") in wanted.project_ids
    metadata = text_by_name(session.user_metadata) or {}
    has_metadata = wanted.user_metadata.items() <= metadata.items()
    return in_project and has_metadata and _is_named(wanted, entry) and _has_status(wanted, entry)


def has_checkpoint(
    wanted: wire.CheckpointSearchRequest, record: CheckpointRecord, run: RunRecord, session: SessionRecord
) -> bool:
    """Return True if a checkpoint matches a search."""
    metadata = text_by_name(record.user_metadata) or {}
    return (
        (wanted.checkpoint_type in (None, TYPE_BY_KIND[record.kind]))
        and (wanted.base_models is None or run.base_model in wanted.base_models)
        and (wanted.project_ids is None or (session.project_id or "") in wanted.project_ids)
        and wanted.user_metadata.items() <= metadata.items()
    )


def summary_of(entry: SessionEntry, tenant: TenantId, stored: Stored) -> wire.SessionSummary:
    """Return a session in wire format."""
    session = entry.record
    return wire.SessionSummary(
        session_id=session.id,
        created_at=_time_of(entry.cursor),
        owner=tenant,
        project_id=session.project_id or "",
        status=status_of(entry),
        checkpoints_count=stored.count,
        display_name=session.display_name,
        user_metadata=text_by_name(session.user_metadata),
        checkpoint_storage_bytes=stored.size_bytes,
    )


def status_of(entry: SessionEntry) -> wire.SessionStatus | None:
    """Return the status of a session, or None if unknown."""
    if entry.failed_run is not None:
        reason = wire.FailedRunReason(training_run_id=entry.failed_run)
        return wire.SessionFailed(reason=reason, message=Reason.RUN_FAILED.message)
    if entry.record.finished_at is not None:
        return wire.SessionFinished(reason=wire.FinishReason.model_validate({"type": entry.record.finish_reason}))
    return wire.SessionActive() if entry.is_alive else None


def cursor_at(position: Cursor) -> wire.SessionSearchCursor:
    """Return a position in the list of sessions as a cursor."""
    return wire.SessionSearchCursor(last_created_at=_time_of(position), last_session_id=position.session)


def position_of(cursor: wire.SessionSearchCursor) -> Cursor:
    """Parse the result of `cursor_at`."""
    return Cursor(us_of(cursor.last_created_at), cursor.last_session_id)


def us_of(time: datetime) -> int:
    """Return a time in µs since 1970."""
    return (time - _EPOCH) // _MICROSECOND


def time_at(us: int) -> datetime:
    """Return the time of µs since 1970."""
    return _EPOCH + _MICROSECOND * us


def _is_named(wanted: wire.SessionSearchRequest, entry: SessionEntry) -> bool:
    if wanted.session_id is None and wanted.display_name is None:
        return True
    if entry.record.id == wanted.session_id:
        return True
    words = (wanted.display_name or "").lower().split()
    name = (entry.record.display_name or "").lower()
    return bool(words) and all(word in name for word in words)


def _has_status(wanted: wire.SessionSearchRequest, entry: SessionEntry) -> bool:
    status = status_of(entry)
    return wanted.statuses is None or any(_asks_for(query, status) for query in wanted.statuses)


def _asks_for(query: wire.StatusQuery, status: wire.SessionStatus | None) -> bool:
    match status:
        case wire.SessionActive():
            return isinstance(query, wire.ActiveStatusQuery)
        case wire.SessionFailed():
            return isinstance(query, wire.FailedStatusQuery)
        case wire.SessionFinished():
            if not isinstance(query, wire.ClientFinishedStatusQuery):
                return False
            return query.reasons is None or status.reason.type in query.reasons
    return False


def _time_of(position: Cursor) -> datetime:
    return time_at(position.created_at_us)
