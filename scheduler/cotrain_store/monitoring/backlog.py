"""How much waits in a pool, as time, and how many workers would end it soon. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What waits shall be done with within this time.
WANTED_WITHIN_S = 60.0


def backlog_seconds(tokens: int, rates: Sequence[float], measured: float) -> float:
    """Return the time that queued tokens take; `rates` are of live workers, in tokens/s.

    Without a live worker, that of one at the rate `measured` last.
    """
    rate = sum(rates) or measured
    return tokens / rate if rate > 0 else 0.0


def workers_wanted(tokens: int, rates: Sequence[float], measured: float, *, is_busy: bool) -> int:
    """Count the workers, as fast as those there are, that end what waits within `WANTED_WITHIN_S`.

    One at least while anything waits or runs (`is_busy`), and none for a pool at rest.
    """
    rate = sum(rates) / len(rates) if rates else measured
    wanted = math.ceil(tokens / (rate * WANTED_WITHIN_S)) if rate > 0 else 0
    return max(wanted, 1) if is_busy else 0
