"""Room in memory for saves that wait for the disk. While there is none, saves wait, and nothing else.

The planner is told before the commit that leaves no room, so that it plans no further save; its runs wait
behind it. A step that holds one all the same (a dead worker's, most likely) waits as a whole.
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


class SavingRoom:
    """One worker's room for saves, as its loop and its planner see it."""

    def __init__(self, weights: WeightsStore, beat: Callable[[], None]) -> None:
        """`beat` gives a sign of life, which tells `takes_saves`."""
        self._weights = weights
        self._beat = beat
        self._told = True
        self._waiting_cycle = 0
        self.takes_saves = True
        """Whether there is room for another save. Any thread may look."""

    def tell(self, saves: Iterable[Saved] = ()) -> None:
        """Have the planner know whether there is room beside these saves. Twice is harmless.

        Raises what the beat raises; the next call tells it then.
        """
        self.takes_saves = self._weights.has_room_for(saves)
        if self.takes_saves != self._told:
            self._beat()
            self._told = self.takes_saves
            log.info("room_for_saves", takes_saves=self._told)

    def has_room(self, step: Step) -> bool:
        """Tell whether a step may run now: what was accepted is never refused, but it may have to wait."""
        has_save = any(op.kind is OpKind.SAVE for op in step.ops)
        has_room = not has_save or self._weights.has_room_for(())
        if not has_room and step.cycle != self._waiting_cycle:
            self._waiting_cycle = step.cycle
            log.warning("step_waits_for_saves", cycle=step.cycle)
        return has_room
