"""How soon a process that died is started again. Pure; times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
WINDOW_S = 60.0
#: This many deaths within the window are no accident.
CRASH_LOOP_DEATHS = 5


@dataclass(frozen=True)
class Deaths:
    """When a process died, within the last WINDOW_S."""

    times: tuple[float, ...] = ()

    def plus(self, now: float) -> Deaths:
        """Note one more death, and forget the old ones."""
        return Deaths((*(time for time in self.times if now - time < WINDOW_S), now))

    @property
    def delay_s(self) -> float:
        """How long to wait before the next start: 0.1 s, doubled with each death, at most 5 s."""
        if self.is_crash_loop:
            return LONGEST_DELAY_S
        return min(FIRST_DELAY_S * 2.0 ** (len(self.times) - 1), LONGEST_DELAY_S)

    @property
    def is_crash_loop(self) -> bool:
        """Whether an operator should look: it is still started again, but only every 5 s."""
        return len(self.times) >= CRASH_LOOP_DEATHS
