"""Back-pressure of saves: while too many wait in memory for the disk, saves wait, and nothing else.

The planner learns of it before the commit that fills the memory, so that it plans no further save; the
runs of such saves wait. A step that holds a save all the same (a dead worker's, most likely) waits as a
whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from cotrain_store.messages.ops import OpKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cotrain_store.messages.ops import Step
    from cotrain_workers.checkpoints.files import Saved
    from cotrain_workers.checkpoints.weights_store import WeightsStore

log = structlog.get_logger()


class SaveBackpressure:
    """Whether one worker takes saves, as its loop and its planner see it."""

    def __init__(self, weights: WeightsStore, send_heartbeat: Callable[[], None]) -> None:
        """`send_heartbeat` publishes `takes_saves`."""
        self._weights = weights
        self._send_heartbeat = send_heartbeat
        self._published = True
        self._waiting_cycle = 0
        self.takes_saves = True
        """Whether another save may be planned. Any thread may look."""

    def publish(self, saves: Iterable[Saved] = ()) -> None:
        """Have the planner know whether memory takes more than these saves. Twice is harmless.

        Raises what the heartbeat raises; the next call publishes it then.
        """
        self.takes_saves = self._weights.has_capacity_for(saves)
        if self.takes_saves != self._published:
            self._send_heartbeat()
            self._published = self.takes_saves
            log.info("save_backpressure_changed", takes_saves=self._published)

    def admits(self, step: Step) -> bool:
        """Tell whether a step may run now: what was accepted is never refused, but it may have to wait."""
        has_save = any(op.kind is OpKind.SAVE for op in step.ops)
        is_admitted = not has_save or self._weights.has_capacity_for(())
        if not is_admitted and step.cycle != self._waiting_cycle:
            self._waiting_cycle = step.cycle
            log.warning("step_waits_for_saves", cycle=step.cycle)
        return is_admitted
