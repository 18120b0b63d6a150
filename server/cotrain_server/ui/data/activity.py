"""The last hour of a pool as numbers per second, for small charts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cotrain_store.monitoring.last_hour import Minute

MINUTE_S = 60.0
#: Numbers under a chart are of so many minutes.
RECENT = 15
PHASES = ("train", "optim", "sample")


def activity_of(minutes: Sequence[Minute], workers: int, now: float) -> dict[str, Any]:
    """Make the charts of a pool: tokens per second, and what its devices were busy with, minute by minute.

    Times of sampling count when a request ends; a minute's parts never come to more than the whole.
    """
    spans = [_span_s(minute, now) for minute in minutes]
    tokens = [minute.of("tokens") / span for minute, span in zip(minutes, spans, strict=True)]
    sampled = [
        minute.of("sampled_tokens") / span for minute, span in zip(minutes, spans, strict=True)
    ]
    duty = [
        _duty(minute, max(workers, 1) * span) for minute, span in zip(minutes, spans, strict=True)
    ]
    recent_s = sum(spans[-RECENT:])
    return {
        "starts": [minute.start_s for minute in minutes],
        "tokens_per_s": [round(value, 3) for value in tokens],
        "sampled_per_s": [round(value, 3) for value in sampled],
        "duty": duty,
        "recent": {
            "tokens_per_s": _sum(minutes, "tokens") / recent_s,
            "sampled_per_s": _sum(minutes, "sampled_tokens") / recent_s,
            "cycles": _sum(minutes, "cycles"),
            "failed": _sum(minutes, "failed"),
            "padding": _padding(minutes),
            **{phase: _mean(duty, phase) for phase in (*PHASES, "idle")},
        },
    }


def own_activity_of(minutes: Sequence[Minute], now: float) -> dict[str, Any]:
    """Make a tenant's charts, of what it used alone."""
    spans = [_span_s(minute, now) for minute in minutes]
    return {
        "starts": [minute.start_s for minute in minutes],
        "tokens_per_s": [
            round(minute.of("own_tokens") / span, 3)
            for minute, span in zip(minutes, spans, strict=True)
        ],
        "device": [
            round(min(1.0, minute.of("own_device_s") / span), 4)
            for minute, span in zip(minutes, spans, strict=True)
        ],
        "device_s": sum(minute.of("own_device_s") for minute in minutes),
        "tokens": sum(minute.of("own_tokens") for minute in minutes),
    }


def _span_s(minute: Minute, now: float) -> float:
    """Say how much of a minute is over."""
    return min(MINUTE_S, max(1.0, now - minute.start_s))


def _duty(minute: Minute, device_s: float) -> dict[str, float]:
    parts = {phase: min(1.0, minute.of(f"{phase}_s") / device_s) for phase in PHASES}
    too_much = max(1.0, sum(parts.values()))
    shares = {phase: round(part / too_much, 4) for phase, part in parts.items()}
    return {**shares, "idle": round(max(0.0, 1.0 - sum(shares.values())), 4)}


def _sum(minutes: Sequence[Minute], name: str) -> float:
    return sum(minute.of(name) for minute in minutes[-RECENT:])


def _padding(minutes: Sequence[Minute]) -> float:
    padding, tokens = _sum(minutes, "padding_tokens"), _sum(minutes, "tokens")
    return padding / (padding + tokens) if padding else 0.0


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    recent = rows[-RECENT:]
    return sum(row[name] for row in recent) / len(recent) if recent else 0.0
