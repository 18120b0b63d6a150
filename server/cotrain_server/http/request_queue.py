"""Decides whose request is read next, when more come than can be answered. Pure: no socket, no clock.

A request costs some twenty times as much to answer as to receive. So what arrives is not parsed at once but round robin:
one request of each caller, then the next of each. A tenant that sends thousands waits behind itself alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

Waiting = TypeVar("Waiting")

#: Requests taken in one iteration of the event loop, of all callers. More of them make each longer, and a request takes many;
#: fewer cost throughput: what goes to Redis in one iteration goes there in one batch.
AT_ONCE = 16


class RequestQueue(Generic[Waiting]):
    """What waits, by caller. Each caller's own comes in the order in which it arrived."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        """Let `at_once` go at a time."""
        self._at_once = at_once
        self._by_caller: OrderedDict[Hashable, deque[Waiting]] = OrderedDict()  # who is next, first

    def __bool__(self) -> bool:
        """Tell whether anything waits."""
        return bool(self._by_caller)

    def wait(self, caller: Hashable, waiting: Waiting) -> None:
        """Put it behind all that its caller has here."""
        self._by_caller.setdefault(caller, deque()).append(waiting)

    def take(self) -> list[Waiting]:
        """Take the first of each caller, and so on."""
        taken: list[Waiting] = []
        while self._by_caller and len(taken) < self._at_once:
            caller, waiting = next(iter(self._by_caller.items()))
            taken.append(waiting.popleft())
            if waiting:
                self._by_caller.move_to_end(caller)
            else:
                del self._by_caller[caller]
        return taken
