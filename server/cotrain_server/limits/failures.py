"""Counter of wrong API keys per address."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from cotrain_server.errors import TooManyFailures

FAILURES_PER_MINUTE = 10
_WINDOW_S = 60.0
_ADDRESSES_KEPT = 10_000


class FailureCounter:
    """Counts of wrong keys per address. A valid key always passes, because an office may share one address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times_by_address: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, address: str) -> None:
        """Count one failure. Raises TooManyFailures after FAILURES_PER_MINUTE of them."""
        now = self._clock()
        times = self._times_by_address.setdefault(address, deque(maxlen=FAILURES_PER_MINUTE))
        self._times_by_address.move_to_end(address)
        if len(self._times_by_address) > _ADDRESSES_KEPT:
            self._times_by_address.popitem(last=False)
        if len(times) == FAILURES_PER_MINUTE and now - times[0] < _WINDOW_S:
            raise TooManyFailures
        times.append(now)
