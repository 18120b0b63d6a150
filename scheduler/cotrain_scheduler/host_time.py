"""The host's time of day, for what reads it again and again: whether it was set in between."""

from __future__ import annotations

import time

#: Between two readings the time may have been set, or the host may have slept.
_JUMP_S = 1.0


class HostTime:
    """One reader's clock."""

    def __init__(self) -> None:
        self.now = time.time()
        self._offset_s = self.now - time.monotonic()

    def read(self) -> float:
        """Read it into `now`; return by how many seconds it jumped since it was last read, 0 for not.

        After a jump, what was noted before cannot be compared with it.
        """
        steady = time.monotonic()
        offset_s = time.time() - steady
        jumped_s, self._offset_s = offset_s - self._offset_s, offset_s
        self.now = steady + offset_s
        return jumped_s if abs(jumped_s) > _JUMP_S else 0.0
