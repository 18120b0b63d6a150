"""A worker's heartbeat, from a thread of its own; it notices when another process took the worker's id."""

from __future__ import annotations

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

HEARTBEAT_S = 2.0


class Heartbeat:
    """Sends heartbeats until `end`, also while the worker drains; sets `stopping` once this worker was replaced."""

    def __init__(
        self,
        execution: Execution,
        describe: Callable[[], WorkerHeartbeat],
        stopping: threading.Event,
    ) -> None:
        self._execution = execution
        self._describe = describe
        self._stopping = stopping
        self._ended = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(
            target=self._send_until_stopped, name="heartbeat", daemon=True
        )
        self.was_replaced = False

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def end(self) -> None:
        """Send no more, and wait for the last one."""
        self._ended.set()
        self._thread.join()

    def send(self) -> None:
        """Send one now; a later one never holds older facts.

        Raises:
            Fenced: this worker was replaced.
        """
        with self._one_at_a_time:
            self._execution.heartbeat(self._describe())

    def _send_until_stopped(self) -> None:
        try:
            while True:
                try:
                    self.send()
                except Fenced:
                    self.was_replaced = True
                    return
                except (OSError, *CONNECTION_LOST):  # the former where nothing can be opened now
                    log.warning("heartbeat_failed")
                if self._ended.wait(HEARTBEAT_S):
                    return
        finally:  # no step is planned for a worker without a heartbeat: it ends, whatever the reason
            self._stopping.set()
