"""The scheduler's settings."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from cotrain_store.settings.store import StoreSettings


class ClockMode(StrEnum):
    """When a cycle starts."""

    #: As soon as a worker is free and something is queued.
    EAGER = "eager"
    #: On multiples of the period, as the hosted services document it.
    METRONOME = "metronome"


class SchedulerSettings(StoreSettings):
    """What the clock and the planner need; every field is also a `COTRAIN_*` variable."""

    clock_mode: ClockMode = ClockMode.EAGER
    clock_period_s: float = Field(default=10.0, gt=0, le=3600)
    """A cycle holds no more work than a worker does in this time; in metronome mode, when one starts."""
    reassign_after_s: float = Field(default=30.0, gt=0)
    """A worker without a heartbeat for this long loses its work to another one of its pool."""
    gap_limit_s: float = Field(default=900.0, gt=0)
    """After this long behind a missing seq_id, waiting requests fail instead of waiting on."""
