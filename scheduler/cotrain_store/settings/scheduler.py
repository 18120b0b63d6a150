"""The scheduler's settings."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

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
    """A small request has its result within this time; in metronome mode, when a cycle starts."""
    reassign_after_s: float = Field(default=30.0, gt=0)
    """A worker without a heartbeat for this long loses its work to another one of its pool."""
    workers_min: int = Field(default=1, ge=0)
    """As few workers as a pool is said to want; 0: none once it has had no work for `idle_after_s`."""
    workers_max: int = Field(default=0, ge=0)
    """As many as a pool is said to want; 0: no limit."""
    idle_after_s: float = Field(default=900.0, gt=0)
    """A pool that had nothing to do for so long has no work."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if 0 < self.workers_max < self.workers_min:
            raise ValueError(f"workers_max: {self.workers_max} is less than workers_min.")
        return self
