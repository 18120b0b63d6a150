"""Usage by hour and session in the hosted services' billing format, and by run in our own."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias, get_args

from cotrain.wire import usage as wire
from cotrain_server.errors import Invalid
from cotrain_store.messages.ids import SessionId
from cotrain_store.messages.runs import SessionRecord, Tenant
from cotrain_store.usage import HOUR, UsageKind, UsageRow

LONGEST = timedelta(days=14)

#: Amount of each kind.
_Used: TypeAlias = defaultdict[UsageKind, float]


@dataclass(frozen=True)
class Window:
    """Time range of whole hours in UTC."""

    start: datetime
    end: datetime


def window(starting_on: datetime, ending_before: datetime, now: datetime) -> Window:
    """Validate a window by the rules of the hosted services. A time without a zone is UTC. Raises Invalid: the message
    names the violated rule.
    """
    start, end = _in_utc(starting_on, "starting_on"), _in_utc(ending_before, "ending_before")
    if start > now:
        raise Invalid("starting_on must not be in the future.")
    if end <= start:
        raise Invalid("ending_before must be after starting_on.")
    if end - start > LONGEST:
        raise Invalid("ending_before may be at most 14 days after starting_on.")
    return Window(start, end)


def last_day(now: datetime) -> Window:
    """Return the last 24 hours, including the current one."""
    end = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0) + HOUR
    return Window(end - 24 * HOUR, end)


def events_of(
    rows: Iterable[UsageRow], sessions: Mapping[SessionId, SessionRecord], tenant: Tenant
) -> list[wire.UsageEvent]:
    """Return the usage of each session in each hour, by hour, then the largest first."""
    used: defaultdict[tuple[datetime, str, str], _Used] = defaultdict(_nothing)
    for row in rows:
        used[row.hour, row.base_model, row.session][row.what] += row.amount
    events = [
        wire.UsageEvent(
            bucket_start=hour,
            bucket_end=hour + HOUR,
            base_model=base_model or None,
            user_id=tenant.id,
            user_name=tenant.name,
            session_id=session or None,
            project_id=_project(sessions, session),
            event_info=info,
        )
        for (hour, base_model, session), amounts in used.items()
        for info in _infos(amounts)
    ]
    return sorted(events, key=lambda event: (event.bucket_start, -_tokens(event.event_info)))


def sources_of(rows: Iterable[UsageRow]) -> list[wire.SourceUsage]:
    """Return the usage of each run and sampler, by device time in descending order."""
    used: defaultdict[tuple[str, str, str], _Used] = defaultdict(_nothing)
    for row in rows:
        used[row.source, row.session, row.base_model][row.what] += row.amount
    sources = [
        wire.SourceUsage(source=source, session_id=session, base_model=base_model, amounts=_amounts(amounts))
        for (source, session, base_model), amounts in used.items()
    ]
    return sorted(sources, key=lambda of: (-of.amounts.device_s, -of.amounts.training_tokens, of.source))


def total_of(rows: Iterable[UsageRow]) -> wire.Amounts:
    """Return the total usage."""
    used = _nothing()
    for row in rows:
        used[row.what] += row.amount
    return _amounts(used)


def _nothing() -> _Used:
    return defaultdict(float)


def _in_utc(time: datetime, name: str) -> datetime:
    try:
        in_utc = time.replace(tzinfo=time.tzinfo or UTC).astimezone(UTC)
    except OverflowError as out_of_range:
        raise Invalid(f"{name} is outside the range of times.") from out_of_range
    if in_utc != in_utc.replace(minute=0, second=0, microsecond=0):
        raise Invalid(f"{name} must be a full UTC hour, for example 2026-07-13T00:00:00Z.")
    return in_utc


def _infos(amounts: _Used) -> list[wire.UsageInfo]:
    """Return the kinds with usage. prefill_tokens includes the cached ones."""
    used = _amounts(amounts)
    infos: list[wire.UsageInfo] = [
        wire.TrainingUsage(token_count=used.training_tokens),
        wire.PrefillUsage(cached=False, token_count=used.prefill_tokens - used.cached_tokens),
        wire.PrefillUsage(cached=True, token_count=used.cached_tokens),
        wire.SampleUsage(token_count=used.sampled_tokens),
        wire.CheckpointUsage(count=used.checkpoints),
    ]
    return [info for info in infos if _tokens(info) or getattr(info, "count", 0)]


def _tokens(info: wire.UsageInfo) -> int:
    return 0 if isinstance(info, wire.CheckpointUsage) else info.token_count


def _amounts(amounts: _Used) -> wire.Amounts:
    counts = {what: round(amounts[what]) for what in get_args(UsageKind) if what != "device_s"}
    return wire.Amounts(device_s=round(amounts["device_s"], 6), **counts)


def _project(sessions: Mapping[SessionId, SessionRecord], session: str) -> str | None:
    record = sessions.get(SessionId(session))
    return record.project_id if record else None
