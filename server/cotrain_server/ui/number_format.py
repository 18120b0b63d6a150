"""Formatting of numbers with units, and of times, for pages. Pure; `now` is an argument."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

#: Placeholder for an unknown value.
NOTHING = "\u2013"
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))


def count(value: float | None) -> str:
    """Return a count in full: 12,345."""
    return NOTHING if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Return a large number in three digits: 12.3 k."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for size, unit in _SI:
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def size(value: float | None) -> str:
    """Return a size in bytes: 1.5 GB."""
    if value is None:
        return NOTHING
    for unit_bytes, unit in _BYTES:
        if value >= unit_bytes:
            return f"{value / unit_bytes:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """Return a duration: 12 ms, 3.4 s, 2 min 5 s, 3 h 20 min."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if not seconds:
        return "0 s"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    days, rest_hours = divmod(hours, 24)
    if days:
        return f"{days} d {rest_hours} h"
    return f"{hours} h {rest_minutes} min" if hours else f"{minutes} min {rest_s} s"


def percent(part: float | None) -> str:
    """Return a fraction as a percentage: 42 %."""
    return NOTHING if part is None or not math.isfinite(part) else f"{part * 100:.3g} %"


def decimal(value: float | None) -> str:
    """Return a measurement, such as a loss, in five digits."""
    if value is None:
        return NOTHING
    return f"{value:.5g}"


def age(seconds: float) -> str:
    """Return an age: 5 s ago."""
    if seconds < 0:
        return "in " + age(-seconds).removesuffix(" ago")
    for size_s, unit in _AGES:
        if seconds >= size_s:
            return f"{seconds // size_s:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 1 else "now"


def ago(at: float | None, now: float) -> Markup:
    """Return a time relative to `now`, with the absolute time as its title; seconds since the epoch."""
    return escape(NOTHING) if at is None else _time(at, age(now - at))


def old(at: float, now: float) -> Markup:
    """Return the age of a time as `ago` does, in short: 5 min."""
    return _time(at, age(now - at).removesuffix(" ago"))


def _time(at: float, text: str) -> Markup:
    moment = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        moment.isoformat(timespec="seconds"), f"{moment:%Y-%m-%d %H:%M:%S} UTC", text
    )


def plural(amount: float, one: str, many: str = "") -> str:
    """Return a count with its noun: 1 worker, 2 workers."""
    return f"{amount:,.0f} {one if amount == 1 else many or one + 's'}"


_FILTERS = (count, short, size, duration, percent, decimal, ago, old, plural)
FILTERS: Mapping[str, Callable[..., Any]] = {each.__name__: each for each in _FILTERS}
