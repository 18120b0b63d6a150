"""Usage reports over windows of whole hours."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from cotrain.wire.usage import CheckpointUsage, PrefillUsage, SampleUsage, TrainingUsage
from cotrain_server.errors import Invalid
from cotrain_server.views.usage import events_of, last_day, sources_of, total_of, window
from cotrain_store.messages.ids import SessionId, TenantId
from cotrain_store.messages.runs import SessionRecord, Tenant
from cotrain_store.usage import UsageKind, UsageRow

NOW = datetime(2026, 7, 14, 12, 30, tzinfo=UTC)
NOON = datetime(2026, 7, 14, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
ALICE = Tenant(TenantId("t-alice"), "alice")
SESSION = SessionRecord(SessionId("s1"), ALICE.id, 0.0, project_id="nightly")


def row(what: UsageKind, amount: float, *, hour: datetime = NOON, session: str = "s1", source: str = "r1") -> UsageRow:
    return UsageRow(hour, what, "tiny/model", session, source, amount)


def test_a_window_of_whole_hours_is_accepted_in_any_time_zone() -> None:
    asked = window(datetime(2026, 7, 14, 13, tzinfo=timezone(3 * HOUR)), NOON, NOW)
    assert (asked.start, asked.end) == (NOON - 2 * HOUR, NOON)


def test_a_time_without_a_zone_is_utc() -> None:
    assert window(datetime(2026, 7, 14), NOON, NOW).start == datetime(2026, 7, 14, tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "end", "rule"),
    [
        (NOON - timedelta(minutes=30), NOON, "starting_on must be a full UTC hour"),
        (NOON - HOUR, NOON + timedelta(microseconds=1), "ending_before must be a full UTC hour"),
        (NOON + HOUR, NOON + 2 * HOUR, "must not be in the future"),
        (NOON, NOON, "must be after starting_on"),
        (NOON - timedelta(days=14, hours=1), NOON, "at most 14 days"),
        (datetime.min.replace(tzinfo=timezone(HOUR)), NOON, "outside the range of times"),
    ],
)
def test_an_invalid_window_is_refused_with_the_violated_rule(start: datetime, end: datetime, rule: str) -> None:
    with pytest.raises(Invalid, match=rule):
        window(start, end, NOW)


def test_the_longest_window_is_accepted() -> None:
    assert window(NOON - timedelta(days=14), NOON, NOW).end == NOON


def test_the_last_day_includes_the_current_hour() -> None:
    recent = last_day(NOW)
    assert (recent.start, recent.end) == (NOON - 23 * HOUR, NOON + HOUR)


def test_usage_of_a_session_is_summed_with_the_largest_amount_first() -> None:
    rows = [
        row("sampled_tokens", 5),
        row("training_tokens", 100, source="r1"),
        row("training_tokens", 200, source="r2"),
        row("device_s", 1.5),
        row("checkpoints", 2),
    ]
    events = events_of(rows, {SESSION.id: SESSION}, ALICE)
    assert [event.event_info for event in events] == [
        TrainingUsage(token_count=300),
        SampleUsage(token_count=5),
        CheckpointUsage(count=2),
    ]
    assert {event.project_id for event in events} == {"nightly"}
    assert {(event.bucket_start, event.bucket_end) for event in events} == {(NOON, NOON + HOUR)}


def test_cached_prompt_tokens_are_counted_apart_from_computed_ones() -> None:
    rows = [row("prefill_tokens", 10), row("cached_tokens", 4)]
    assert [event.event_info for event in events_of(rows, {}, ALICE)] == [
        PrefillUsage(cached=False, token_count=6),
        PrefillUsage(cached=True, token_count=4),
    ]


def test_hours_are_in_order_of_time() -> None:
    rows = [row("sampled_tokens", 900), row("sampled_tokens", 1, hour=NOON - HOUR)]
    assert [event.bucket_start for event in events_of(rows, {}, ALICE)] == [NOON - HOUR, NOON]


def test_sources_are_ordered_by_device_time_and_totalled() -> None:
    rows = [
        row("device_s", 0.25, source="r1"),
        row("device_s", 0.5, source="r2", hour=NOON - HOUR),
        row("device_s", 1.0, source="r2"),
        row("training_tokens", 7, source="r1"),
    ]
    assert [(of.source, of.amounts.device_s) for of in sources_of(rows)] == [("r2", 1.5), ("r1", 0.25)]
    assert (total_of(rows).device_s, total_of(rows).training_tokens) == (1.75, 7)
