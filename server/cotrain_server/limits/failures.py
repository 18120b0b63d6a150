"""How often an address may show a wrong key."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from cotrain_server.errors import TooManyFailures

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES_PER_MINUTE = 10
_WINDOW_S = 60.0
_ADDRESSES_KEPT = 10_000


class FailureCounter:
    """Counts wrong keys per address. A right key always passes: an office shares one address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times_by_address: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, address: str) -> None:
        """Count one failure; raises TooManyFailures after FAILURES_PER_MINUTE of them."""
        now = self._clock()
        times = self._times_by_address.setdefault(address, deque(maxlen=FAILURES_PER_MINUTE))
        self._times_by_address.move_to_end(address)
        if len(self._times_by_address) > _ADDRESSES_KEPT:
            self._times_by_address.popitem(last=False)
        if len(times) == FAILURES_PER_MINUTE and now - times[0] < _WINDOW_S:
            raise TooManyFailures
        times.append(now)
