"""Settings of the scheduler."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from cotrain_store.settings.store import StoreSettings


class ClockMode(StrEnum):
    """Start condition of a cycle."""

    #: As soon as a worker is idle and a request is queued.
    EAGER = "eager"
    #: On multiples of the period, as the hosted services document it.
    METRONOME = "metronome"


class SchedulerSettings(StoreSettings):
    """Settings of the clock and the planner. Every field is also a `COTRAIN_*` variable."""

    clock_mode: ClockMode = ClockMode.EAGER
    clock_period_s: float = Field(default=10.0, gt=0, le=3600)
    """Target time in s for the result of a small request. In metronome mode, the interval between cycle starts."""
    reassign_after_s: float = Field(default=30.0, gt=0)
    """Time in s without a heartbeat after which another worker of the pool takes over a worker's work."""
    workers_min: int = Field(default=1, ge=0)
    """Minimum of the recommended number of workers of a pool; 0: none after `idle_after_s` without work."""
    workers_max: int = Field(default=0, ge=0)
    """Maximum of the recommended number of workers of a pool; 0: no limit."""
    idle_after_s: float = Field(default=900.0, gt=0)
    """Time in s without work after which a pool counts as idle."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if 0 < self.workers_max < self.workers_min:
            raise ValueError(f"workers_max: {self.workers_max} is less than workers_min.")
        return self
