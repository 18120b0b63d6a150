"""When an event is tried again, and when it is given up. Pure; times in seconds."""

from __future__ import annotations

FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 3600.0
GIVEN_UP_AFTER_S = 24 * 3600.0


def retry_in(attempts: int, age_s: float) -> float | None:
    """Say when to try an event again after so many attempts: 5 s, 10 s, 20 s, … an hour. None: never."""
    wait_s: float = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempts - 1, 20))
    return wait_s if age_s + wait_s <= GIVEN_UP_AFTER_S else None
