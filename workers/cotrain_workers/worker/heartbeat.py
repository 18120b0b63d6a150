"""A worker's sign of life, from a thread of its own; it notices when another process took the place."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import structlog

from cotrain_store.errors import Fenced
from cotrain_store.redis_client.connection import CONNECTION_LOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from cotrain_store.messages.fleet import WorkerHeartbeat
    from cotrain_store.oplog.execution import Execution

log = structlog.get_logger()

BEAT_S = 2.0


class Heart:
    """Beats until `stopping` is set, and sets it itself once this worker was replaced."""

    def __init__(
        self,
        execution: Execution,
        describe: Callable[[], WorkerHeartbeat],
        stopping: threading.Event,
    ) -> None:
        self._execution = execution
        self._describe = describe
        self._stopping = stopping
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._beat_until_stopped, name="beat", daemon=True)
        self.was_replaced = False

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the last beat."""
        self._thread.join()

    def beat(self) -> None:
        """Beat now; what is said next is never older than what was said before.

        Raises:
            Fenced: this worker was replaced.
        """
        with self._one_at_a_time:
            self._execution.heartbeat(self._describe())

    def _beat_until_stopped(self) -> None:
        try:
            while True:
                try:
                    self.beat()
                except Fenced:
                    self.was_replaced = True
                    return
                except (OSError, *CONNECTION_LOST):  # the former where nothing can be opened now
                    log.warning("beat_lost")
                if self._stopping.wait(BEAT_S):
                    return
        finally:  # nobody counts on a worker without a sign of life: it ends, whatever the reason
            self._stopping.set()


def resident_bytes() -> int:
    """Measure this process's memory."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123  # a kernel file, not a path to resolve
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
