"""Filters of the searches of sessions and checkpoints, and the result format of sessions."""

from datetime import UTC, datetime, timedelta

from cotrain.wire import rest as wire
from cotrain.wire.checkpoints import TYPE_BY_KIND
from cotrain_server.views.records import text_by_name
from cotrain_store.errors import Reason
from cotrain_store.messages.ids import TenantId
from cotrain_store.messages.runs import CheckpointRecord, RunRecord, SessionRecord
from cotrain_store.tenants.lists import Cursor, SessionEntry, Stored

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


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
