"""What a process could not do with its object store: every failure is counted, one in so long is logged."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger()

LOG_EVERY_S = 10.0


class Failures:
    """What one process cannot do with its store: counted, and logged now and then. Any thread may note one."""

    def __init__(self) -> None:
        self.count: Callable[[str], None] = lambda _: None
        """Counts a failure of an operation; set by the process that shows metrics."""
        self._lock = threading.Lock()
        self._logged_at = -LOG_EVERY_S
        self._failed_since = 0.0

    def note(self, operation: str, key: str, reason: str) -> None:
        """Count a failure."""
        self.count(operation)
        now = time.monotonic()
        with self._lock:
            self._failed_since = self._failed_since or now
            is_due = now - self._logged_at >= LOG_EVERY_S
            self._logged_at = now if is_due else self._logged_at
        if is_due:
            log.error("object_store_unavailable", operation=operation, key=key, reason=reason)

    def note_success(self) -> None:
        """Say once that the store answers again."""
        if self._failed_since:
            with self._lock:
                since, self._failed_since = self._failed_since, 0.0
            if since:
                log.info("object_store_available", after_s=round(time.monotonic() - since, 1))


FAILURES = Failures()
