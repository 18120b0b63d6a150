"""The keys of time: what it is for the store, and what ends when."""

from __future__ import annotations


def clock() -> str:
    """Name the store's clock, in ms; lives permanently, and only grows.

    It began at the time of day. Since then the scheduler that leads counts on a clock that is never set.
    """
    return "cotrain:clock"


def ends() -> str:
    """Name the sorted set of keys that end (score: when, by `clock`)."""
    return "cotrain:ends"
